"""Flower's configuration: celery -A workers.app flower --conf=configs/flowerconfig.py

Variables FLOWER_<OPTION> and the command line go before what is written here.
"""

import os
import sys

from kombu.transport import TRANSPORT_ALIASES
from tornado.options import options

from producer.errors import ConfigError
from producer.keys import INFER_QUEUE
from workers.app import app
from workers.flower_options import DEFAULT_ADDRESS, credentials, format_task
from workers.settings import EXIT_CONFIG

__all__ = ["format_task"]

try:
    basic_auth = credentials(os.environ, sys.argv, options.address, other_login=bool(options.auth))
except ConfigError as failure:
    print(f"flower: {failure.message}", file=sys.stderr)
    sys.exit(EXIT_CONFIG)

# Flower knows a broker by its URL's scheme, which a transport of another name would replace.
TRANSPORT_ALIASES |= dict.fromkeys(("redis", "rediss"), app.conf.broker_transport)
app.conf.broker_transport = None
# Its broker page shows this queue when no worker has told its own.
app.conf.task_default_queue = INFER_QUEUE

_defaults = {
    "address": DEFAULT_ADDRESS,
    # No button that stops workers or their consumers; `trtq worker` has its own drain.
    "read_only": True,
    # Some 5 KB each.
    "max_tasks": 5000,
    "max_workers": 500,
    # Containers that are replaced leave names behind.
    "purge_offline_workers": 3600,
    # History is Prometheus' business: nothing is written to disk.
    "persistent": False,
    "db": "",
    "natural_time": True,
    "tasks_columns": "name,args,state,result,received,runtime,worker,uuid",
}
globals().update(
    {name: value for name, value in _defaults.items() if f"FLOWER_{name.upper()}" not in os.environ}
)
