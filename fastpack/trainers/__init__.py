"""Options for trainers that are already built: token budgets, step weights and the fused loss.

``loss_units`` names the unit over which each trainer's loss is a mean. ``loader`` gives a trainer token-budget batches.
``step_weights`` weights and splits micro-batches. ``budget`` checks, sets up and removes a trainer's token budget.
``fused_loss`` replaces the loss of TRL's ``SFTTrainer``. ``preference_losses`` has DPO's losses on packed pairs for
your own loops. ``reference`` computes reference log-probabilities once. ``metrics`` logs tokens, speed and MFU.

Only attributes of one trainer instance and of its accelerator change, never a class.
"""
