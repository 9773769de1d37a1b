from collections.abc import Iterator

import pytest

from paceline.engine.engine import Engine
from tests.server.serving import Caller, app_of, tiny_engine


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """One for all tests: what one of them does to it, the next one would notice."""
    engine = tiny_engine()
    yield engine
    engine.close()


@pytest.fixture
def caller(engine: Engine) -> Caller:
    return Caller(app_of(engine))
