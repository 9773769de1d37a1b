"""What Ray Serve calls to choose a replica. Ray copies this module to its processes.

`PrefixRouter` runs in the process of the ingress, on a thread of its own; the decision is made by the client of that
process (`ray_client.py`), which has the reports of the engines.
"""

from __future__ import annotations

from collections.abc import Sequence

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from paceline.server import ray_client
from paceline.server.ray_calls import RunJob, ToReplica


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        match pending_request.args if pending_request is not None else ():
            case [RunJob() as call, *_]:
                chosen = await ray_client.DIRECTORY.choose(
                    call, [one.replica_id.unique_id for one in candidate_replicas]
                )
                if chosen is not None:
                    return [self._replica(chosen)]  # none: Ray asks again
            case [ToReplica(replica), *_]:
                # Another replica refuses a call to one that has gone.
                return [self._replica(replica) or candidate_replicas]
        return [candidate_replicas]

    def _replica(self, id: str) -> list[RunningReplica]:
        return [replica for found, replica in self.curr_replicas.items() if found.unique_id == id]

    def update_replicas(self, replicas: Sequence[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._publish()

    def _publish(self) -> None:
        ray_client.DIRECTORY.publish([one.unique_id for one in self.curr_replicas])
