"""Processes: the only room that knows Ray.

Ray reads these variables when it is imported, so they are set here, before any module of the room can import it:
token authentication with a token of this run's own, no usage reports, and no second OpenMP thread in any worker.
"""

import os
import secrets

os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
