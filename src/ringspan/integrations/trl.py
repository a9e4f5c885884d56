"""TRL's ``SFTTrainer`` with packing and context parallelism.

::

    from ringspan.integrations.accelerate import ParallelismConfig
    from ringspan.integrations.trl import SFTTrainer

    config = SFTConfig(..., packing=True, parallelism_config=ParallelismConfig(cp_size=2))
    SFTTrainer(model, config, train_dataset=...).train()

TRL 1.16 refuses packing together with ``cp_size > 1``: the context parallelism of PyTorch drops the mask, so that
packed documents would attend to each other. ringspan attends under the mask, so this class allows both.
"""

from __future__ import annotations

from typing import Any

import trl

from ringspan.errors import InputError
from ringspan.integrations.accelerate import use_ringspan


class SFTTrainer(trl.SFTTrainer):
    """A ``trl.SFTTrainer`` whose context parallelism is ringspan's, and which packs documents under it."""

    _packing: tuple[bool, bool | None] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().__init__(*args, **kwargs)
        finally:
            if self._packing is not None:
                self.args.packing, self.args.eval_packing = self._packing
        config = self.accelerator.parallelism_config
        if config is not None and config.cp_size > 1 and not self.model_accepts_loss_kwargs:
            raise InputError(
                "this model takes no num_items_in_batch. TRL would then divide a loss by the labels of each rank's tokens, and "
                "the mean of the ranks is not the mean of the tokens"
            )

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, and let it use ringspan.

        The constructor of TRL packs the data sets before it calls this, and refuses packing afterwards. So the two
        settings are off until the constructor has returned. ``evaluate`` reads them later.
        """
        super().create_accelerator_and_postprocess()
        use_ringspan(self)
        self._packing = self.args.packing, self.args.eval_packing
        self.args.packing = self.args.eval_packing = False
