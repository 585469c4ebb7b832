"""The training loop: tasks and their losses, optimisers, fine-tuning, checkpoints, logs and plots."""
