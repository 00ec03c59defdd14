"""Parts that every training uses: trainer, workers, optimisers, schedules, checkpoints, losses."""
