"""Optuna proposes trials, and atoll runs each as a training, four at a time.

pip install optuna, then python examples/optuna_sweep.py
After Ctrl-C, the same command continues: the study is in a file, and no trial is trained twice.
"""

from __future__ import annotations

import os
from typing import Any

import atoll

ROUNDS, AT_ONCE = int(os.environ.get("ROUNDS", "5")), 4


def train(lr: float, width: int) -> float:
    """Stands for a training. Optuna minimises what it returns."""
    return (lr - 0.1) ** 2 + (width - 24) ** 2 / 1e4


def main() -> None:
    import optuna  # imported here, because ranks run `train` and do not need it

    study = optuna.create_study(
        study_name="atoll",
        storage="sqlite:///optuna.db",
        sampler=optuna.samplers.TPESampler(seed=0),
        load_if_exists=True,
    )
    running = study.get_trials(states=[optuna.trial.TrialState.RUNNING])
    if running:  # of a run that was interrupted
        settle(study, {trial.number: trial.params for trial in running})
    for _ in range(ROUNDS):
        asked = [study.ask() for _ in range(AT_ONCE)]
        settle(study, {trial.number: propose(trial) for trial in asked})
    print(f"best of {len(study.trials)}: {study.best_value:.5f} with {study.best_params}")


def settle(study: Any, settings: dict[int, dict[str, Any]]) -> None:
    """Train with each of the settings, and report the results to the study by trial number."""
    rows = atoll.Client().map(train, settings.values(), concurrency=AT_ONCE)
    for number, row in zip(settings, rows, strict=True):
        study.tell(number, row.result, skip_if_finished=True)  # None: the trial failed
    print(rows)


def propose(trial: Any) -> dict[str, Any]:
    return {
        "lr": trial.suggest_float("lr", 1e-3, 1.0, log=True),
        "width": trial.suggest_int("width", 8, 64),
    }


if __name__ == "__main__":
    main()
