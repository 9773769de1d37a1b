"""The scheduler: decides which requests run. It imports no tensor library, reads no clock and does no I/O."""

from paceline.scheduler.journal import Counters, Event, EventKind, Journal
from paceline.scheduler.memory import PinError
from paceline.scheduler.plan import Finished, Join, Plan, Swap, Updates
from paceline.scheduler.scheduler import Scheduler
from paceline.scheduler.step_time import StepTime

__all__ = [
    "Counters",
    "Event",
    "EventKind",
    "Finished",
    "Join",
    "Journal",
    "PinError",
    "Plan",
    "Scheduler",
    "StepTime",
    "Swap",
    "Updates",
]
