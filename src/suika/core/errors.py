"""Errors that a user can act on: they name the field, the value and the fix."""


class SpecError(ValueError):
    """A user's mistake. Never shown with a traceback; `field`, `value`, `problem` and `fix` are machine-readable."""

    def __init__(self, field: str, value: object, problem: str, fix: str = "") -> None:
        self.field, self.value, self.problem, self.fix = field, value, problem, fix
        shown = repr(value)
        if len(shown) > 200:
            shown = shown[:197] + "..."
        super().__init__(f"{field}={shown}: {problem}" + (f". {fix}" if fix else ""))


class NotFoundError(SpecError):
    """What the user names does not exist (or not for them)."""


class ConflictError(SpecError):
    """In order by itself, but at odds with what is there already."""


def require(condition: bool, field: str, value: object, problem: str, fix: str = "") -> None:
    """Raise `SpecError` unless `condition` holds."""
    if not condition:
        raise SpecError(field, value, problem, fix)
