"""One call to a running cluster, with the exit codes that every command shares.

0: done; 1: the cluster failed at it; 2: a user's mistake; 3: no cluster answers.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from suika.cli.output import note
from suika.core.errors import SpecError

FAILED, MISTAKE, NO_CLUSTER = 1, 2, 3
OUTAGE_S = 60.0  # who waits for a job goes on waiting while the controller is away: its job does not end by that
_AGAIN_S = 0.5


def reach(call: str, **arguments: Any) -> Any:
    """The result of `call`, from `$SUIKA_SERVER` or from this machine's controller. Raises the client's errors."""
    if server := os.environ.get("SUIKA_SERVER"):
        from suika.control.remote import call as send_far

        return send_far(call, server, **arguments)
    from suika.control.client import call as send

    return send(call, **arguments)


def ask(call: str, *, patience_s: float = 0.0, **arguments: Any) -> Any:
    """The result of `call`, from `$SUIKA_SERVER` or from this machine's controller.

    Ends the process with a line on stderr if there is none, after `patience_s` of asking again."""
    from suika.control.client import ControllerFaultError, NoControllerError

    until_s = time.monotonic() + patience_s
    while True:
        try:
            return reach(call, **arguments)
        except SpecError as error:
            note(f"suika: {error}")
            sys.exit(MISTAKE)
        except NoControllerError as error:
            if time.monotonic() >= until_s:
                note(f"suika: {error}")
                sys.exit(NO_CLUSTER)
            time.sleep(_AGAIN_S)
        except ControllerFaultError as error:
            note(f"suika: the controller failed: {error}")
            sys.exit(FAILED)
