"""Plans that were given, not made here: for which steps they are followed."""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)

SWITCHED = "-"  # in a signature, before which modules do not train as the model does, if any


class Given:
    """The signature of the plan that was given, until it was followed."""

    def __init__(self) -> None:
        """Begin without a plan."""
        self._signature: str | None = None
        self._has_told = False  # that it is not followed

    def give(self, signature: str) -> None:
        """Note a plan for steps of a signature."""
        self._signature = signature

    def rename(self, former: str, signature: str) -> None:
        """Note that steps of one signature have another one."""
        if self._signature == former:
            self._signature = signature

    def find(self, signature: str) -> str:
        """Return the signature under which a plan is known for a step that begins.

        One that was saved before signatures had a second part is for whatever modules train. If the
        plan is not for the step, say so once: another one is made without a word.
        """
        given = self._signature
        if given is None or given == signature:
            return signature
        if signature.partition(SWITCHED)[0] == given:
            return given
        if not self._has_told:
            self._has_told = True
            _log.warning(
                "the given plan is not followed in these steps, which get one of their own: it was "
                "made for other inputs, or other modules train"
            )
        return signature

    def end(self, signature: str) -> None:
        """Note that a step has ended: the plan was followed if it was for that."""
        if self._signature == signature:
            self._signature = None
