"""One call to a running cluster, with the exit codes that every command shares.

0: done; 1: the cluster failed at it; 2: a user's mistake; 3: no cluster answers.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from suika.cli.output import note
from suika.core.errors import SpecError

FAILED, MISTAKE, NO_CLUSTER = 1, 2, 3


def reach(call: str, **arguments: Any) -> Any:
    """The result of `call`, from `$SUIKA_SERVER` or from this machine's controller. Raises the client's errors."""
    if server := os.environ.get("SUIKA_SERVER"):
        from suika.control.remote import call as send_far

        return send_far(call, server, **arguments)
    from suika.control.client import call as send

    return send(call, **arguments)


def ask(call: str, **arguments: Any) -> Any:
    """The result of `call`, from `$SUIKA_SERVER` or from this machine's controller.

    Ends the process with a line on stderr if there is none."""
    from suika.control.client import ControllerFaultError, NoControllerError

    try:
        return reach(call, **arguments)
    except SpecError as error:
        note(f"suika: {error}")
        sys.exit(MISTAKE)
    except NoControllerError as error:
        note(f"suika: {error}")
        sys.exit(NO_CLUSTER)
    except ControllerFaultError as error:
        note(f"suika: the controller failed: {error}")
        sys.exit(FAILED)
