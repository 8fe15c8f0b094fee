"""A process with helpers, as data loaders are; loaded by name in the fork."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from suika.runtime.messages import Channel

SLEEP = [sys.executable, "-c", "import time; time.sleep(300)"]
LEAVE = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], start_new_session=True, stdout=2).pid)"


def sleep_with_children(channel: Channel, launch: Mapping[str, Any]) -> None:
    for _ in range(4):
        subprocess.Popen(SLEEP)
    parent = subprocess.run([sys.executable, "-c", LEAVE, *SLEEP], stdout=subprocess.PIPE, check=True)
    channel.send({"say": "spawned", "left": int(parent.stdout), "pid": os.getpid()})
    time.sleep(300)
