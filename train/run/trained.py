"""Whether a run trains at all: one private warning where no loss is finite or all gradients are zero."""

import logging
import math

_log = logging.getLogger("jaxacct.train")
_PATIENCE = 10  # steps

_REASONS = (
    "no example of the first {steps} steps had a finite loss and gradient, so all count as zero and only "
    "noise is trained on: check labels, inputs and learning rate",
    "all gradients of the first {steps} steps are zero, so only noise is trained on: check that the loss of "
    "one example depends on the parameters",
)


class Watch:
    """Looks at the private metrics of steps until one has a gradient, and warns once where none has.

    The warning is a function of the data, so it goes to the operator's log alone and never to a file of the
    run; it raises nothing, as whether a run ends must not depend on the data.
    """

    def __init__(self):
        self.is_open = True  # whether it wants to see more steps
        self._steps, self._dropped, self._finite = 0, 0.0, False

    def see(self, metrics: dict[str, float | None], *, last: bool) -> None:
        """Look at one step; `last` is whether it is the run's last one."""
        norm = metrics.get("max_norm")
        if not self.is_open or "max_norm" not in metrics:
            self.is_open = False
            return
        self._steps += 1
        self._dropped += metrics["dropped"] or 0.0
        self._finite |= norm is not None and math.isfinite(norm)
        if norm is not None and norm > 0:
            self.is_open = False
        elif (self._steps >= _PATIENCE or last) and (self._finite or self._dropped):
            self.is_open = False
            reason = _REASONS[self._finite].format(steps=self._steps)
            _log.warning("private, not to be published: %s", reason)
