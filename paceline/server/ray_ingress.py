"""The ingress deployment of Ray Serve: HTTP, tokenizing and detokenizing, with the app of `paceline serve`."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.config import ServerConfig, TenantConfig
from paceline.logs import set_up_logs
from paceline.server.app import App
from paceline.server.auth import ApiKeys
from paceline.server.body_workers import BodyWorkers
from paceline.server.engine_client import ServedModel
from paceline.server.ray_client import RayClient
from paceline.server.state import ServerState
from paceline.text.load import load_tokenizer

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle


class IngressSetup(msgspec.Struct, frozen=True):
    name: str  # of the served model
    tokenizer: str | None  # a model, by path or name; None: synthetic
    weights: str  # which the engines run
    config: ServerConfig
    tenants: tuple[TenantConfig, ...]
    num_slots: int  # replicas that there can be, those that are stopping included


class _LifespanApp:
    """An app for Ray, which sends lifespan events too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return


_app: _LifespanApp | None = None  # of this process


def app_of_this_process() -> ASGIApp:
    assert _app is not None, "Ray calls this after the constructor of the ingress"
    return _app


class Ingress:
    async def __init__(self, engines: DeploymentHandle, setup: IngressSetup) -> None:  # type: ignore[misc]
        """`engines`: the handle of the engine deployment."""
        global _app  # noqa: PLW0603
        name = f"ingress-{uuid.uuid4().hex[:12]}"
        set_up_logs(setup.config.log_level, setup.config.log_format, name)
        self._client = RayClient(name, engines, setup.weights, setup.config, setup.tenants, setup.num_slots)

        def source(model: ServedModel) -> str | int:
            return model.vocab_size if setup.tokenizer is None else setup.tokenizer

        tokenizer = await self._client.start(lambda model: load_tokenizer(source(model)))
        self._state = ServerState(
            client=self._client,
            tokenizer=tokenizer,
            workers=BodyWorkers(tokenizer, source(self._client.model)),
            config=setup.config,
            model_name=setup.name,
            api_keys=ApiKeys(setup.tenants, setup.config.admin_key),
            worker=name,
        )
        _app = _LifespanApp(App(self._state))

    async def __del__(self) -> None:
        self._state.workers.close()
        await self._client.close()
