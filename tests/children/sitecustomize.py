"""Runs at the start of each Python that a test starts: the root's `conftest.py` puts this folder on their path.

What those programs print is compared.  The alarm for slow handlers goes by real time, and on a machine that does other work every handler
is slow now and then, so these programs do not give it.
"""

from __future__ import annotations

import logging

logging.getLogger("levada.framework.observe").addFilter(lambda record: vars(record).get("event") != "slow_handler")
