"""Options for trainers that are already built: token budgets, step weights and the fused loss.

``kinds`` has the unit that each trainer's loss is a mean over. ``loader`` gives a trainer token-budget batches.
``step_weights`` weights and splits micro-batches. ``budget`` checks all of it, sets it up and removes it.
``fused_loss`` replaces the loss of TRL's ``SFTTrainer``. ``preference_losses`` has DPO's losses on packed pairs for
your own loops, ``reference`` computes reference log-probabilities once, ``metrics`` logs tokens, speed and MFU.

Only attributes of one trainer instance and of its accelerator change, never a class.
"""
