"""Constants of losses by construction: gradient sensitivity, smoothness, strong convexity."""

import math

from jaxacct.common import validate as _validate


def logistic_conditions(
    num_classes: int, feature_norm: float, regularization: float = 0.0, clip_norm: float | None = None
) -> dict[str, float]:
    """Return the constants of regularised logistic regression on features of bounded norm.

    A constant 1 is appended to the features. With `|x|^2 = feature_norm^2 + 1`: a binary gradient has norm at
    most |x|, or `clip_norm`, and its slope is `|x|^2 / 4`; for softmax `sqrt(2) |x|` and `|x|^2 / 2`. The
    ridge term cancels in the difference of two examples' gradients and adds to both curvatures
    (proofs/shifted_interpolation.md).

    Args:
      num_classes: 2 is the binary loss with one weight vector; more is softmax.
      feature_norm: largest norm of features, before the constant.
      regularization: m, of `(m/2) |weights|^2` in every example's loss.
      clip_norm: of per-example gradients; binary only.

    Returns:
      "grad_sensitivity" L, "smoothness" M and "strong_convexity" m.
    """
    classes = _validate.positive_integer("num_classes", num_classes, minimum=2)
    norm = math.hypot(_validate.scale("feature_norm", feature_norm), 1.0)
    ridge = _validate.scale_or_zero("regularization", regularization)
    if clip_norm is not None:
        _validate.scale("clip_norm", clip_norm)
        if classes > 2:
            raise ValueError(
                "clip_norm must not be given for more than two classes: a clipped softmax gradient is "
                "not the gradient of a convex loss; bound feature_norm instead"
            )
    if classes > 2:
        longest, curvature = 2**0.5 * norm, norm**2 / 2
    else:
        longest, curvature = norm if clip_norm is None else min(norm, clip_norm), norm**2 / 4
    return {
        "grad_sensitivity": 2 * longest,
        "smoothness": curvature + ridge,
        "strong_convexity": ridge,
    }
