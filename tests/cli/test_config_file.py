"""Options from a file, the environment and the command line, in that order of weight."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import ConfigError, read_file
from tests.server.virtual import get, virtual

GOOD = """
model = "some/model"
[server]
port = 9000
served_name = "filed"
[scheduler]
max_running = 7
[[tenants]]
name = "a"
keys = ["k1", "k2"]
weight = 2.5
"""


def test_a_file_has_options_by_room_and_tenants(tmp_path: Path) -> None:
    path = tmp_path / "paceline.toml"
    path.write_text(GOOD)
    file = read_file(path)
    assert file.model == "some/model" and file.load is None
    assert file.options == {"port": 9000, "served_name": "filed", "max_running": 7}
    (tenant,) = file.tenants
    assert tenant.name == "a" and tenant.keys == ("k1", "k2") and tenant.weight == 2.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server", "cannot be read"),
        ("[server]\nprot = 1", "paceline.toml: [server] has 'prot', which is not known: did you mean port?"),
        ("[scheduler]\nport = 1", "paceline.toml: [scheduler] has 'port', which is not known"),
        ("server = 3", "paceline.toml: server is 3: write a table."),
        ("tenants = 3", "paceline.toml: tenants is 3: write [[tenants]] tables."),
        ("[[tenants]]\nweight = 1.0", "a tenant has no name: give it one."),
        ("[[tenants]]\nname = 'a'\nweight = 0", "weight is 0: give 1e-06 or more."),
        ("[[tenants]]\nname = 'a'\nkeys = 'k'", "keys is 'k': give a list of words."),
        ("[[tenants]]\nname = 'a'\nkeys = [1]", "keys is (1,): give a list of words."),
        ("[[tenants]]\nname = 'a'\n[[tenants]]\nname = 'a'", "two tenants have the same name: give each its own."),
        ("[[tenants]]\nname='a'\nkeys=['k']\n[[tenants]]\nname='b'\nkeys=['k']", "the same key: give each its own."),
        ("modle = 'x'", "paceline.toml has 'modle', which is not known: did you mean model?"),
        ("model = 3", "paceline.toml: model is 3: give a word."),
    ],
)  # fmt: skip
def test_a_wrong_file_is_told_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "paceline.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    assert message in str(caught.value)


def test_a_flag_goes_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "paceline.toml"
    path.write_text(
        "[server]\nserved_name = 'filed'\n[scheduler]\nmax_running = 7\nnum_pages = 100\ncontext_tokens = 300"
    )
    monkeypatch.setenv("PACELINE_MAX_RUNNING", "9")
    monkeypatch.setenv("PACELINE_NUM_PAGES", "200")
    with virtual("--config", str(path), "--num-pages", "50") as served:
        assert get(served, "/v1/models").json()["data"][0]["id"] == "filed"
        assert get(served, "/v1/models").json()["data"][0]["max_model_len"] == 300
        assert "9 requests at once" in served.output and "KV of 800 tokens" in served.output
