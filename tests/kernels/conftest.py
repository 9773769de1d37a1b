"""Kernels run in Triton's interpreter here: it shows on any machine whether they are correct, not how fast they are."""

from collections.abc import Iterator

import pytest

from paceline.kernels._triton import HAS_TRITON
from tests.kernels.bounds import checked_bounds


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/kernels" not in item.path.as_posix():
            continue
        # The interpreter of triton 3.6 converts one-element arrays to scalars in a way that numpy has deprecated.
        item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))
        if not HAS_TRITON and "without_triton" not in item.name:
            item.add_marker(pytest.mark.skip(reason="triton is not installed, so its interpreter is not either"))


@pytest.fixture(autouse=HAS_TRITON)
def _in_bounds() -> Iterator[None]:
    with checked_bounds():
        yield
