"""The training loop: batches, losses, evaluation, progress. Knows no method and no file format."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.errors import SpecDecError
from specdec.system.logs import get_logger

from .loss import Measures
from .methods.base import TrainableDrafter
from .rows import Rows, choose_rows
from .settings import TrainSettings
from .target import Batch, Target, make_batch

logger = get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Where the loop reports to, and who judges; the defaults are for all but the main process.

    measure_acceptance: called at every evaluation, on the main process.
    is_enough: whether an evaluation ends the training; the same on all processes.
    """

    log: Callable[[dict[str, Any]], None] = lambda line: None
    save: Callable[[dict[str, Any]], None] = lambda checkpoint: None
    measure_acceptance: Callable[[], dict[str, Any]] | None = None
    is_enough: Callable[[Mapping[str, Any]], bool] = lambda evaluation: False


class Loop:
    """One training. `accelerator` spreads it over the devices it was launched on."""

    def __init__(
        self,
        settings: TrainSettings,
        accelerator: Any,
        target: Target,
        drafter: TrainableDrafter,
        train: Rows,
        heldout: Rows,
        hooks: Hooks,
    ) -> None:
        self.settings, self.accelerator, self.hooks = settings, accelerator, hooks
        self.target, self.drafter = target, drafter
        self.train_rows, self.heldout_rows = train, heldout
        optimizer = torch.optim.AdamW(
            drafter.parameters(),
            lr=settings.learning_rate,  # set again before every step
            weight_decay=settings.weight_decay,
        )
        self.model = accelerator.prepare_model(drafter, device_placement=False)
        self.optimizer = accelerator.prepare_optimizer(optimizer)
        self.rows_per_step = (
            settings.batch_size * settings.gradient_accumulation_steps * accelerator.num_processes
        )
        self.num_steps = count_steps(settings, len(train), self.rows_per_step)
        self.step = 0
        self.num_tokens = 0

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; raise ValueError where it is not of this drafter."""
        check_state(checkpoint, self.drafter.state_dict(), list(self.drafter.parameters()))
        self.drafter.load_state_dict(checkpoint["drafter"])
        # The settings decide on the numbers of its groups.
        state = {**self.optimizer.state_dict(), "state": checkpoint["optimizer"]["state"]}
        self.optimizer.load_state_dict(state)
        self.step, self.num_tokens = checkpoint["step"], checkpoint["num_tokens"]

    def _save(self) -> None:
        """Write a checkpoint, which the main process's hook does."""
        self.hooks.save({
            "step": self.step,
            "num_tokens": self.num_tokens,
            "drafter": dict(self.drafter.state_dict()),
            "optimizer": self.optimizer.state_dict(),
        })  # fmt: skip

    def run(self) -> dict[str, Any]:
        """Train to the last step, or until an evaluation is good enough; return the last one."""
        settings = self.settings
        recent: list[float] = []
        began, tokens_then = time.monotonic(), self.num_tokens
        start_step = self.step
        while self.step < self.num_steps:
            step = self.step + 1
            is_last = step == self.num_steps
            logs_now = step % settings.logging_steps == 0 or is_last or step == 1
            measures = self._take_step(step, measure=logs_now)
            recent.append(measures.summarize()["loss"])
            self.step = step
            if logs_now:
                now = time.monotonic()
                line = {
                    "step": step,
                    "tokens": self.num_tokens,
                    "learning_rate": compute_learning_rate(settings, step - 1, self.num_steps),
                    "mean_loss": round(sum(recent) / len(recent), 4),
                    **measures.summarize(),
                    "tokens_per_second": round((self.num_tokens - tokens_then) / (now - began)),
                }
                self.hooks.log(line)
                self._show(line, (now - began) / len(recent), is_start=step == start_step + 1)
                recent.clear()
                began, tokens_then = now, self.num_tokens
            if settings.eval_steps and step % settings.eval_steps == 0 and not is_last:
                evaluation = self._report_evaluation()
                if self.hooks.is_enough(evaluation):
                    logger.info(
                        "step %d of %d: good enough, the training ends here", step, self.num_steps
                    )
                    return evaluation
                began, tokens_then = time.monotonic(), self.num_tokens
                recent.clear()
            if settings.save_steps and step % settings.save_steps == 0 and not is_last:
                self._save()
                self.accelerator.wait_for_everyone()
        return self._report_evaluation()

    def _take_step(self, step: int, *, measure: bool) -> Measures:
        """Do one optimizer step over `rows_per_step` rows."""
        settings, accelerator = self.settings, self.accelerator
        batches = [
            self._load_batch(step - 1, i) for i in range(settings.gradient_accumulation_steps)
        ]
        counts = torch.stack([self.drafter.count_labels(b.mask) for b in batches]).sum(0)
        num_tokens = counts.new_tensor([sum(sum(batch.lengths) for batch in batches)])
        totals = accelerator.reduce(torch.cat([counts, num_tokens]), reduction="sum")
        # The processes' gradients will be averaged, but their losses have to be added up.
        num_labels = totals[:-1].float() / accelerator.num_processes
        self.num_tokens += int(totals[-1])
        sums: Tensor | float = 0.0
        for i, batch in enumerate(batches):
            self._seed(step, i)
            features = self.target.read(batch)
            # Gradients wait on their process for those of the step's last pass.
            waits = i < len(batches) - 1
            with accelerator.no_sync(self.model) if waits else contextlib.nullcontext():
                loss, packed = self.model(features, batch.mask, num_labels, measure)
                accelerator.backward(loss)
            sums = sums + packed.detach()
        measures = Measures.unpack(
            accelerator.reduce(sums, reduction="sum"), self.drafter.num_positions
        )
        if not math.isfinite(float(measures.loss.sum())):
            self._refuse_to_continue(step, float(measures.loss.sum()))
        if settings.max_grad_norm:
            accelerator.clip_grad_norm_(self.model.parameters(), settings.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = compute_learning_rate(settings, step - 1, self.num_steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return measures

    def _seed(self, step: int, part: int) -> None:
        """Let what a drafter draws at random depend only on the place in the training."""
        place = (self.settings.seed, step, part, self.accelerator.process_index)
        seed = int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0]) >> 1
        # torch.manual_seed formats the stack anew for each kind of device that is not in use.
        is_cpu = self.accelerator.device.type == "cpu"
        (torch.default_generator.manual_seed if is_cpu else torch.manual_seed)(seed)

    def _refuse_to_continue(self, step: int, loss: float) -> None:
        raise SpecDecError(
            f"the loss is {loss} at step {step}",
            "lower --learning-rate or raise --warmup-ratio; with --dtype float32 the target's own"
            " overflow can be told apart",
        )

    def _load_batch(self, step: int, part: int) -> Batch:
        """Return this process's rows of a part of a step."""
        size = self.settings.batch_size
        start = step * self.rows_per_step + part * size * self.accelerator.num_processes
        start += size * self.accelerator.process_index
        rows = choose_rows(len(self.train_rows), self.settings.seed, start, size)
        return make_batch(self.train_rows, rows, self.accelerator.device)

    def evaluate(self) -> dict[str, Any]:
        """Measure loss and accuracies on the held-out rows, shared among the processes."""
        num_rows = len(self.heldout_rows)
        wanted = min(self.settings.eval_rows, num_rows)
        chosen = [i * num_rows // wanted for i in range(wanted)]
        num_processes = self.accelerator.num_processes
        # As many rows on every process, which may each hold a part of the target.
        most = len(chosen[::num_processes])
        mine = chosen[self.accelerator.process_index :: num_processes]
        num_mine = len(mine)
        mine += chosen[: most - num_mine]
        size = self.settings.batch_size
        ones = torch.ones(self.drafter.num_positions, device=self.accelerator.device)
        sums: Tensor | float = 0.0
        self.model.eval()
        with torch.no_grad():
            for start in range(0, most, size):
                indices = mine[start : start + size]
                batch = make_batch(self.heldout_rows, indices, self.accelerator.device)
                batch.mask[max(0, num_mine - start) :] = False  # another process counts these
                sums = sums + self.model(self.target.read(batch), batch.mask, ones, True)[1]
        self.model.train()
        total = self.accelerator.reduce(sums, reduction="sum")
        return Measures.unpack(total, self.drafter.num_positions).summarize() | {"rows": wanted}

    def _measure_acceptance(self) -> dict[str, Any] | None:
        """Measure on the main process; all of them get the result, or its error."""
        from accelerate.utils import broadcast_object_list

        outcome: list[Any] = [None]
        if self.hooks.measure_acceptance is not None:
            try:
                outcome = [self.hooks.measure_acceptance()]
            except SpecDecError as error:
                outcome = [(error.message, error.hint)]
        if self.accelerator.num_processes > 1:
            broadcast_object_list(outcome)
        (measured,) = outcome
        if isinstance(measured, tuple):
            self._save()  # what was learned is not lost with it
            raise SpecDecError(*measured)
        return measured  # type: ignore[no-any-return]

    def _report_evaluation(self) -> dict[str, Any]:
        evaluation = self.evaluate()
        if not math.isfinite(evaluation["loss"]):
            self._refuse_to_continue(self.step, evaluation["loss"])
        acceptance = self._measure_acceptance()
        if acceptance is not None:
            evaluation["acceptance"] = acceptance
        self.hooks.log({"step": self.step, "tokens": self.num_tokens, "eval": evaluation})
        logger.info(
            "step %d held out: loss %.3f  top-1 %s  top-%d %s  chain %.2f",
            self.step, evaluation["loss"], _format_accuracies(evaluation, 0),
            len(evaluation["top_k_accuracy"][0]), _format_accuracies(evaluation, -1),
            evaluation["chain_length"],
        )  # fmt: skip
        if acceptance is not None:
            logger.info(
                "step %d engine: acceptance length %.2f over %d prompts", self.step,
                acceptance["acceptance_length"], acceptance["prompts"],
            )  # fmt: skip
        return evaluation

    def _show(self, line: dict[str, Any], seconds_per_step: float, *, is_start: bool) -> None:
        left = ""
        if not is_start:  # the first step warms things up and takes longer
            left = f"  {_format_time((self.num_steps - self.step) * seconds_per_step)} left"
        logger.info(
            "step %d/%d  loss %.3f  top-1 %s  lr %.2e  %d tokens/s%s",
            line["step"], self.num_steps, line["mean_loss"], _format_accuracies(line, 0),
            line["learning_rate"], line["tokens_per_second"], left,
        )  # fmt: skip


def _format_accuracies(measured: Mapping[str, Any], rank: int) -> str:
    """Format each position's accuracy, in percent: top-1 for rank 0, top-K for rank -1."""
    return " ".join(f"{100 * row[rank]:.1f}" for row in measured["top_k_accuracy"])


def _format_time(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else "< 1 min"


def check_state(
    checkpoint: Mapping[str, Any], own: Mapping[str, Tensor], parameters: Sequence[Tensor]
) -> None:
    """Raise ValueError, or what follows from other types, unless a checkpoint is of a drafter.

    torch's optimizers take numbers of any shape, and fail, or spread them, at the next step.
    """
    for name in ("step", "num_tokens"):
        if type(checkpoint[name]) is not int or checkpoint[name] < 0:
            raise ValueError(f"{name} is no count")
    weights = checkpoint["drafter"]
    if {n: t.shape for n, t in weights.items()} != {n: t.shape for n, t in own.items()}:
        raise ValueError("the weights are of another drafter")
    for index, entry in checkpoint["optimizer"]["state"].items():
        shapes = {"exp_avg": 1, "exp_avg_sq": 1, "step": 0}
        is_own = type(index) is int and 0 <= index < len(parameters)
        if not is_own or entry.keys() != shapes.keys():
            raise ValueError("the optimizer is of another drafter")
        for name, is_whole in shapes.items():
            wanted = parameters[index].shape if is_whole else torch.Size(())
            if not isinstance(entry[name], Tensor) or entry[name].shape != wanted:
                raise ValueError(f"{name} of the optimizer is not {list(wanted)}")


def count_steps(settings: TrainSettings, num_rows: int, rows_per_step: int) -> int:
    """Optimizer steps of the whole training."""
    if settings.max_steps is not None:
        return settings.max_steps
    num_epochs = 2.0 if settings.num_epochs is None else settings.num_epochs
    return max(1, math.ceil(num_epochs * num_rows / rows_per_step))


def compute_learning_rate(settings: TrainSettings, step: int, num_steps: int) -> float:
    """Linear warm-up, then half a cosine down to zero. The first step is 0."""
    num_warmup = round(settings.warmup_ratio * num_steps)
    if step < num_warmup:
        return settings.learning_rate * (step + 1) / num_warmup
    done = (step - num_warmup) / max(1, num_steps - num_warmup)
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
