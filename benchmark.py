"""kimi-rig: measure serving configurations one after another, on hosts that deploy.py brought to their state.

--data bench_configurations="a b" and --data bench_sweep=NAME choose; `make bench` adds the report.
"""

from rig.plan.current import current_plan
from tasks.benchmark import benchmark
from tasks.hostkit import hostkit

plan = current_plan()

hostkit(plan=plan)  # rigctl, which measures on the host
benchmark(plan=plan)  # start, accept, warm up, measure, stop, next
