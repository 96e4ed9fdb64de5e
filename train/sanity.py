"""Self-check: a drafter that learns at all can learn one row by heart."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from specdec.errors import SpecDecError
from specdec.system.logs import get_logger

from .settings import TrainSettings

NUM_STEPS = 400  # default of --max-steps
EVAL_STEPS = 20  # steps between evaluations
# Share of right top-1 guesses at every draft position from which a row is known by heart.
WANTED_ACCURACY = 0.9

logger = get_logger(__name__)


def learn_one_row(settings: TrainSettings) -> dict[str, Any]:
    """Train only on the first row of the data; raise SpecDecError where it is not learned."""
    from .devices import start_accelerator
    from .job import make_drafter
    from .loop import Hooks, Loop
    from .rows import prepare_rows
    from .setup import open_target, prepare_setup
    from .target import load_tokenizer

    start_time = time.monotonic()
    accelerator = start_accelerator(settings)
    setup = prepare_setup(settings, accelerator)
    target = open_target(setup)
    tokenizer = load_tokenizer(settings.model_dir, target.shape.vocab_size)
    rows, _ = prepare_rows(settings.data, settings.eval_data, tokenizer, setup.max_length)
    row = rows.take(0, 1)
    settings = dataclasses.replace(
        settings, batch_size=1, gradient_accumulation_steps=1, eval_steps=EVAL_STEPS, save_steps=0,
        num_epochs=None, max_steps=settings.max_steps or NUM_STEPS,
    )  # fmt: skip
    drafter, hooks = make_drafter(setup, target, row), Hooks(is_enough=is_known_by_heart)
    loop = Loop(settings, accelerator, target, drafter, row, row, hooks)
    evaluation = loop.run()
    report = {
        "method": settings.method,
        "sanity": True,
        "steps": loop.step,
        "row_tokens": len(row.tokens),
        "seconds": round(time.monotonic() - start_time, 1),
        "eval": evaluation,
    }
    if not is_known_by_heart(evaluation):
        accuracies = " ".join(f"{100 * x[0]:.1f}" for x in evaluation["top_k_accuracy"])
        raise SpecDecError(
            f"--sanity: after {loop.step} steps on one row of {len(row.tokens)} tokens the"
            f" top-1 accuracies are {accuracies}%, not {100 * WANTED_ACCURACY:g}% or more",
            "raise --max-steps or --learning-rate; if that does not help, look at the data, the"
            " tokenizer and the target: they may not belong together",
        )
    logger.info("one row of %d tokens was learned by heart", len(row.tokens))
    return report


def is_known_by_heart(evaluation: Mapping[str, Any]) -> bool:
    """Return whether every draft position guesses nearly all of the row."""
    return all(row[0] >= WANTED_ACCURACY for row in evaluation["top_k_accuracy"])
