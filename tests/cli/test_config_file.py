"""Options from the configuration file, the environment and the command line, by increasing precedence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.config import ConfigError
from paceline.config_file import read_file
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


def test_a_file_has_options_by_table_and_tenants(tmp_path: Path) -> None:
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
        ("[server]\nprot = 1", "paceline.toml: [server] has an unknown option 'prot': did you mean port or router?"),
        ("[scheduler]\nport = 1", "paceline.toml: [scheduler] has an unknown option 'port'"),
        ("server = 3", "paceline.toml: server is 3: expected a table."),
        ("tenants = 3", "paceline.toml: tenants is 3: expected [[tenants]] tables."),
        ("[[tenants]]\nweight = 1.0", "name of a tenant is missing: every [[tenants]] table needs one."),
        ("[[tenants]]\nname = 'a'\nweight = 0", "weight is 0: must be at least 1e-06."),
        ("[[tenants]]\nname = 'a'\nkeys = 'k'", "keys is 'k': expected a list of strings."),
        ("[[tenants]]\nname = 'a'\nkeys = [1]", "keys is (1,): expected a list of strings."),
        ("[[tenants]]\nname = 'a'\n[[tenants]]\nname = 'a'", "two tenants have the same name: names must be unique."),
        ("[[tenants]]\nname='a'\nkeys=['k']\n[[tenants]]\nname='b'\nkeys=['k']", "API key: keys must be unique."),
        ("[[tenants]]\nname='a'\nkeys=['k', 'k']", "keys of tenant 'a': a key is given twice; remove one."),
        ("[[tenants]]\nname='a'\nkeys=['']", "keys of tenant 'a': a key is empty, perhaps from an unset variable"),
        ("[[tenants]]\nname='a'\nkeys=[' ']", "keys of tenant 'a': a key has a space or another character"),
        ("[[tenants]]\nname='a'\nkeys=['ключ']", "keys of tenant 'a': a key has a space or another character"),
        ("[[tenants]]\nname='a'", "tenant 'a' has no keys, so no request could belong to it: give it keys."),
        ("modle = 'x'", "paceline.toml has an unknown option 'modle': did you mean model?"),
        ("[scheduler]\ndraft_tokens = 1", "paceline.toml: [scheduler] has an unknown option 'draft_tokens'"),
        ("model = 3", "paceline.toml: model is 3: expected a string."),
    ],
)  # fmt: skip
def test_an_invalid_file_is_reported_with_the_place_and_the_remedy(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "paceline.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--admin-key", ""], "admin_key: a key is empty, perhaps from an unset variable"),
        (["--admin-key", "${ADMIN}"], "admin_key: a key begins with $, and variables are not expanded here"),
        (["--admin-key", " "], "admin_key: a key has a space"),
        (["--admin-key", "k1", "--config", "FILE"], "admin_key is also a key of a tenant"),
    ],
)
def test_a_key_that_protects_nothing_ends_the_start(
    run: Callable[..., Any], tmp_path: Path, arguments: list[str], message: str
) -> None:
    path = tmp_path / "paceline.toml"
    path.write_text(GOOD)
    given = [str(path) if one == "FILE" else one for one in arguments]
    result = run("serve", "--executor", "virtual", "--port", "0", *given)
    assert result.exit_code == 2 and message in " ".join(result.output.split())


def test_a_flag_overrides_the_environment_which_overrides_the_file(
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
        assert "up to 9 running requests" in served.output and "KV cache of 800 tokens" in served.output
