"""Public names of `jaxacct.train`, as type checkers and the package itself read them."""

from .models.loss import with_params as with_params
from .models.saving import load_model as load_model
from .models.saving import load_weights as load_weights
from .models.saving import save_model as save_model
from .procedures.batch_clipping import aggregate as aggregate
from .procedures.batch_clipping import clip_by_l2_norm as clip_by_l2_norm
from .procedures.batch_clipping import epoch_batches as epoch_batches
from .procedures.batch_clipping import outer_update as outer_update
from .procedures.batch_clipping import private_round_update as private_round_update
from .procedures.convex import noisy_cgd as noisy_cgd
from .procedures.convex import noisy_gd as noisy_gd
from .procedures.convex import noisy_sgd as noisy_sgd
from .procedures.convex import project_box as project_box
from .procedures.convex import project_l2_ball as project_l2_ball
from .training import TrainOptions as TrainOptions
from .training import fit as fit

__all__: list[str]
