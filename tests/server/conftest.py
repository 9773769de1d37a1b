from collections.abc import Iterator

import pytest

from paceline.engine import trace_recorder
from paceline.engine.engine import Engine
from tests.server.serving import OPEN_WORKERS, Caller, make_app, tiny_engine


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """Shared by all tests of the session, so state left behind by one test shows in the next."""
    engine = tiny_engine()
    yield engine
    engine.close()


@pytest.fixture(scope="module", autouse=True)
def close_workers() -> Iterator[None]:
    """Ends the threads and processes of the apps that a file made."""
    yield
    while OPEN_WORKERS:
        OPEN_WORKERS.pop().close()


@pytest.fixture
def caller(engine: Engine) -> Caller:
    return Caller(make_app(engine))


@pytest.fixture
def short_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces end at once, whatever is asked for."""
    monkeypatch.setattr(trace_recorder, "_sleep", lambda seconds: None)
