"""The orders of kernel libraries alone: with them `rigctl kernel plan` can be asked before a deploy builds anything."""

from rig.plan.current import current_plan
from tasks.sgl_kernel import described

if __name__ == "builtins":
    described(current_plan())
