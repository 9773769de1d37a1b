"""KV events of the engine process: from the scheduler to the publisher, after every step."""

from __future__ import annotations

import contextlib
import logging

from paceline.cluster.kv_events import KvEventLog
from paceline.cluster.kv_publisher import KvEventPublisher
from paceline.config import ConfigError
from paceline.engine.engine import Engine
from paceline.engine.output import EngineFailed
from paceline.server.process_messages import KvEventsSetup

log = logging.getLogger("paceline.engine")


def bind_publisher(setup: KvEventsSetup) -> KvEventPublisher:
    return KvEventPublisher(setup.address, replay_address=setup.replay_address, topic=setup.topic, rank=setup.rank)


class EngineKvEvents:
    def __init__(self, engine: Engine, publisher: KvEventPublisher) -> None:
        self._engine, self._publisher = engine, publisher
        config = engine.scheduler.config
        if not config.prefix_cache:
            publisher.close()
            raise ConfigError(
                "kv_events is given and prefix_cache is off, so no page is cached: remove one of the two."
            )
        self._log = KvEventLog(config.page_size)
        publisher.start(config.num_pages + config.num_host_pages, self._snapshot)
        self._snapshot()
        log.info("KV events are published on %s", " and replayed on ".join(publisher.addresses))

    def publish(self) -> None:
        """On the engine's thread, after a step."""
        events = self._log.take()
        if events:
            self._publisher.publish(events)

    def _snapshot(self) -> None:
        """Has the scheduler report all cached pages, between two steps."""
        with contextlib.suppress(EngineFailed):  # the process ends, and another one begins with a clear
            self._engine.call(lambda scheduler: scheduler.listen(self._log))

    def close(self) -> None:
        self._publisher.close()
