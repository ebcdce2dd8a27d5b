"""Plans that the user gave, and the steps that follow them."""

from __future__ import annotations

from swapkit.texts import get_logger

_log = get_logger(__name__)

SWITCHED = "-"  # in a signature, before the modules whose training mode differs from the model's


class Given:
    """The signature of the given plan, until a step has followed the plan."""

    def __init__(self) -> None:
        """Start without a plan."""
        self._signature: str | None = None
        self._has_told = False  # whether the warning was logged

    def give(self, signature: str) -> None:
        """Set the signature of the given plan."""
        self._signature = signature

    def rename(self, former: str, signature: str) -> None:
        """Change the signature of the given plan, if it is `former`."""
        if self._signature == former:
            self._signature = signature

    def find(self, signature: str) -> str:
        """Return the signature under which a plan is known for a step that begins.

        A plan saved before signatures had a second part is valid for any modules that train. If the
        plan is not for the step, warn once, because the session then makes another plan silently.
        """
        given = self._signature
        if given is None or given == signature:
            return signature
        if signature.partition(SWITCHED)[0] == given:
            return given
        if not self._has_told:
            self._has_told = True
            _log.warning(
                "not following the given plan in these steps: it was made for other inputs or "
                "other trainable modules. Making another plan for them."
            )
        return signature

    def end(self, signature: str) -> None:
        """Forget the plan at the end of a step that followed it."""
        if self._signature == signature:
            self._signature = None
