"""When ranks exchange, and what. A schedule is one file here, found by its name in a method's text.

Each class means what its text means: `DiLoCo(every=10)` is "diloco:every=10".
"""

from stenograd.schedules.diloco import DiLoCo
from stenograd.schedules.every_step import EveryStep
from stenograd.schedules.gossip import Gossip
from stenograd.schedules.local import Local
from stenograd.schedules.schedule import Schedule

__all__ = ["DiLoCo", "EveryStep", "Gossip", "Local", "Schedule"]
