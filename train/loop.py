"""Training loop of any method: batches, optimizer steps, evaluation, progress."""

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
from .optimizer import check_states, compute_learning_rate, list_weights, make_optimizers
from .rows import TokenRows, choose_rows
from .settings import TrainSettings
from .sharding import gather_states, gather_weights, shard_as, shard_drafter
from .target import FrozenTarget, RowBatch, make_batch

logger = get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Functions that the loop calls; the defaults are for all but the main process.

    log: writes a line of progress. save: writes a checkpoint. finish: called after the last line.
    measure_acceptance: called at every evaluation with the drafter's tensors, on the main process.
    is_enough: returns whether an evaluation ends the training, with one result on all processes.
    """

    log: Callable[[dict[str, Any]], None] = lambda line: None
    save: Callable[[dict[str, Any]], None] = lambda checkpoint: None
    finish: Callable[[], None] = lambda: None
    measure_acceptance: Callable[[Mapping[str, Tensor]], dict[str, Any]] | None = None
    is_enough: Callable[[Mapping[str, Any]], bool] = lambda evaluation: False


@dataclasses.dataclass
class Interval:
    """Steps since the newest line of the log, or the newest evaluation: when they began, losses."""

    start_tokens: int
    start_time: float = dataclasses.field(default_factory=time.monotonic)
    losses: list[float] = dataclasses.field(default_factory=list)


class Loop:
    """Loop of one training; accelerator: spreads it over the devices it was launched on."""

    def __init__(
        self,
        settings: TrainSettings,
        accelerator: Any,
        target: FrozenTarget,
        drafter: TrainableDrafter,
        train_rows: TokenRows,
        heldout_rows: TokenRows,
        hooks: Hooks,
    ) -> None:
        self.settings, self.accelerator, self.hooks = settings, accelerator, hooks
        self.target, self.drafter = target, drafter
        self.train_rows, self.heldout_rows = train_rows, heldout_rows
        self.model: Any = drafter
        if settings.shard_drafter and accelerator.num_processes > 1:
            shard_drafter(drafter, accelerator.device, accelerator.num_processes)
        else:
            self.model = accelerator.prepare_model(drafter, device_placement=False)
        self.optimizers = {
            key: accelerator.prepare_optimizer(optimizer)
            for key, optimizer in make_optimizers(settings, drafter).items()
        }
        self.rows_per_step = (
            settings.batch_size * settings.gradient_accumulation_steps * accelerator.num_processes
        )
        self.num_steps = count_steps(settings, len(train_rows), self.rows_per_step)
        self.step = 0
        self.num_tokens = 0

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; raise ValueError where it is not of this drafter."""
        tensors = self.drafter.state_dict()
        check_state(checkpoint, tensors, self.optimizers)
        self.drafter.load_state_dict({
            name: shard_as(tensor, tensors[name]) for name, tensor in checkpoint["drafter"].items()
        })  # fmt: skip
        for key, optimizer in self.optimizers.items():
            weights = list_weights(optimizer)
            states = {
                index: {name: shard_as(tensor, weights[index]) for name, tensor in state.items()}
                for index, state in checkpoint[key]["state"].items()
            }
            # Numbers of the groups, such as the learning rate, come from the settings.
            optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
        self.step, self.num_tokens = checkpoint["step"], checkpoint["num_tokens"]

    def gather_weights(self) -> dict[str, Tensor]:
        """Return the drafter's tensors, whole on the main process; all processes call this."""
        return gather_weights(self.drafter, keeps=self.accelerator.is_main_process)

    def _save(self) -> None:
        """Give a checkpoint to the hook, which writes it on the main process."""
        is_main = self.accelerator.is_main_process
        states = {
            key: optimizer.state_dict()["state"] for key, optimizer in self.optimizers.items()
        }
        self.hooks.save({
            "step": self.step,
            "num_tokens": self.num_tokens,
            "drafter": self.gather_weights(),
            **{key: {"state": gather_states(s, keeps=is_main)} for key, s in states.items()},
        })  # fmt: skip

    def run(self) -> dict[str, Any]:
        """Train to the last step, or until an evaluation is good enough; return the evaluation."""
        settings, first_step = self.settings, self.step + 1
        interval = Interval(self.num_tokens)
        while self.step < self.num_steps:
            step = self.step + 1
            is_last = step == self.num_steps
            is_logged = step % settings.logging_steps == 0 or is_last or step == 1
            measures = self.take_step(step, measure=is_logged).summarize()
            interval.losses.append(measures["loss"])
            self.step = step
            if is_logged:
                # The first step takes longer than the others, so it tells nothing of what is left.
                self._log(measures, interval, shows_time_left=step > first_step)
                interval = Interval(self.num_tokens)
            if is_last:
                break
            if settings.eval_steps and step % settings.eval_steps == 0:
                evaluation = self._report_evaluation()
                if self.hooks.is_enough(evaluation):
                    logger.info(
                        "step %d of %d: good enough, the training ends here", step, self.num_steps
                    )
                    return evaluation
                interval = Interval(self.num_tokens)
            if settings.save_steps and step % settings.save_steps == 0:
                self._save()
                self.accelerator.wait_for_everyone()
        return self._report_evaluation()

    def _log(
        self, measures: Mapping[str, Any], interval: Interval, *, shows_time_left: bool
    ) -> None:
        """Write a line of the newest step's measures, the interval's mean loss and its speed."""
        seconds, num_steps = time.monotonic() - interval.start_time, len(interval.losses)
        line = {
            "step": self.step,
            "tokens": self.num_tokens,
            "learning_rate": compute_learning_rate(self.settings, self.step - 1, self.num_steps),
            "mean_loss": round(sum(interval.losses) / num_steps, 4),
            **measures,
            "tokens_per_second": round((self.num_tokens - interval.start_tokens) / seconds),
        }
        self.hooks.log(line)
        time_left = ""
        if shows_time_left:
            seconds_left = (self.num_steps - self.step) * seconds / num_steps
            time_left = f"  {_format_time(seconds_left)} left"
        logger.info(
            "step %d/%d  loss %.3f  top-1 %s  lr %.2e  %d tokens/s%s",
            line["step"], self.num_steps, line["mean_loss"], _format_accuracies(line, 0),
            line["learning_rate"], line["tokens_per_second"], time_left,
        )  # fmt: skip

    def take_step(self, step: int, *, measure: bool) -> Measures:
        """Do one optimizer step over `rows_per_step` rows."""
        batches = [
            self.load_batch(step - 1, i) for i in range(self.settings.gradient_accumulation_steps)
        ]
        for coming_step in range(step - 1, min(step + 1, self.num_steps)):
            for i in range(len(batches)):
                self.target.expect(self.train_rows, self._choose_batch(coming_step, i))
        num_labels, num_tokens = self._count_labels(batches)
        self.num_tokens += num_tokens
        sums = self._add_gradients(step, batches, num_labels, measure=measure)
        measures = Measures.unpack(
            self.accelerator.reduce(sums, reduction="sum"), self.drafter.num_positions
        )
        if not math.isfinite(float(measures.loss.sum())):
            self._refuse_to_continue(step, float(measures.loss.sum()))
        self._apply_gradients(step)
        return measures

    def _count_labels(self, batches: Sequence[RowBatch]) -> tuple[Tensor, int]:
        """Count a step's labels of each position [P], which divide its losses, and its tokens."""
        counts = torch.stack([self.drafter.count_labels(b.mask) for b in batches]).sum(0)
        num_tokens = counts.new_tensor([sum(sum(batch.lengths) for batch in batches)])
        totals = self.accelerator.reduce(torch.cat([counts, num_tokens]), reduction="sum")
        # The processes' gradients will be averaged, but their losses have to be added up.
        return totals[:-1].float() / self.accelerator.num_processes, int(totals[-1])

    def _add_gradients(
        self, step: int, batches: Sequence[RowBatch], num_labels: Tensor, *, measure: bool
    ) -> Tensor | float:
        """Add up the gradients of a step's batches; return the sums of their packed measures."""
        accelerator = self.accelerator
        sums: Tensor | float = 0.0
        for i, batch in enumerate(batches):
            self._seed(step, i)
            features = self.target.read(batch)
            # Processes add up gradients at the step's last batch alone, unless each keeps a part.
            accumulates = i < len(batches) - 1 and not self.drafter.is_sharded
            with accelerator.no_sync(self.model) if accumulates else contextlib.nullcontext():
                with accelerator.autocast():
                    loss, packed = self.model(features, batch.mask, num_labels, measure)
                accelerator.backward(loss)
            sums = sums + packed.detach()
        return sums

    def _apply_gradients(self, step: int) -> None:
        """Clip the gradients, let the optimizers take their steps, and forget the gradients."""
        if self.settings.max_grad_norm:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
        for key, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = compute_learning_rate(self.settings, step - 1, self.num_steps, key)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def _seed(self, step: int, batch_index: int) -> None:
        """Seed the drafter's random numbers by the step and each row's place among its rows."""
        first_place = self._find_first_place(batch_index)
        places = range(first_place, first_place + self.settings.batch_size)
        entropies = ((self.settings.seed, step, place) for place in places)
        seeds = [
            int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) >> 1
            for entropy in entropies
        ]
        self.drafter.row_seeds = seeds
        # torch.manual_seed formats the stack anew for each kind of device that is not in use.
        is_cpu = self.accelerator.device.type == "cpu"
        (torch.default_generator.manual_seed if is_cpu else torch.manual_seed)(seeds[0])

    def _refuse_to_continue(self, step: int, loss: float) -> None:
        raise SpecDecError(
            f"the loss is {loss} at step {step}",
            "lower --learning-rate or raise --warmup-ratio; with --dtype float32 the target's own"
            " overflow can be told apart",
        )

    def load_batch(self, step: int, batch_index: int) -> RowBatch:
        """Return this process's rows of one batch of a step."""
        row_indices = self._choose_batch(step, batch_index)
        return make_batch(self.train_rows, row_indices, self.accelerator.device)

    def _choose_batch(self, step: int, batch_index: int) -> list[int]:
        """Return the indices of this process's rows of one batch of a step."""
        start = step * self.rows_per_step + self._find_first_place(batch_index)
        size = self.settings.batch_size
        return choose_rows(len(self.train_rows), self.settings.seed, start, size)

    def _find_first_place(self, batch_index: int) -> int:
        """Return the place of a batch's first row among the rows of its step."""
        accelerator = self.accelerator
        batches_before: int = batch_index * accelerator.num_processes + accelerator.process_index
        return self.settings.batch_size * batches_before

    def evaluate(self) -> dict[str, Any]:
        """Measure loss and accuracies on the held-out rows, shared among the processes."""
        num_rows = len(self.heldout_rows)
        num_evaluated = min(self.settings.eval_rows, num_rows)
        evaluated_rows = [i * num_rows // num_evaluated for i in range(num_evaluated)]
        num_processes = self.accelerator.num_processes
        # Every process runs equally often, as each may hold a shard of the target.
        rows_per_process = len(evaluated_rows[::num_processes])
        process_rows = evaluated_rows[self.accelerator.process_index :: num_processes]
        num_counted = len(process_rows)
        process_rows += evaluated_rows[: rows_per_process - num_counted]
        size = self.settings.batch_size
        unit_counts = torch.ones(self.drafter.num_positions, device=self.accelerator.device)
        sums: Tensor | float = 0.0
        self.model.eval()
        self.target.expect(self.heldout_rows, process_rows)
        with torch.no_grad():
            for start in range(0, rows_per_process, size):
                indices = process_rows[start : start + size]
                batch = make_batch(self.heldout_rows, indices, self.accelerator.device)
                batch.mask[max(0, num_counted - start) :] = False  # another process counts these
                features = self.target.read(batch)
                with self.accelerator.autocast():
                    sums = sums + self.model(features, batch.mask, unit_counts, True)[1]
        self.model.train()
        total = self.accelerator.reduce(sums, reduction="sum")
        return Measures.unpack(total, self.drafter.num_positions).summarize() | {
            "rows": num_evaluated
        }

    def _measure_acceptance(self) -> dict[str, Any] | None:
        """Measure the acceptance on the main process; all processes get it, or raise its error."""
        from accelerate.utils import broadcast_object_list

        outcome: list[Any] = [None]
        weights = self.gather_weights() if self.settings.eval_prompts else {}
        if self.hooks.measure_acceptance is not None:
            try:
                outcome = [self.hooks.measure_acceptance(weights)]
            except SpecDecError as error:
                outcome = [(error.message, error.hint)]
        if self.accelerator.num_processes > 1:
            broadcast_object_list(outcome)
        (acceptance_or_error,) = outcome
        if isinstance(acceptance_or_error, tuple):
            self._save()  # so that the weights are not lost
            raise SpecDecError(*acceptance_or_error)
        return acceptance_or_error  # type: ignore[no-any-return]

    def _report_evaluation(self) -> dict[str, Any]:
        """Evaluate and measure the acceptance; write a line of both, and return it."""
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


def _format_accuracies(measures: Mapping[str, Any], rank: int) -> str:
    """Format each position's accuracy, in percent: top-1 for rank 0, top-K for rank -1."""
    return " ".join(f"{100 * row[rank]:.1f}" for row in measures["top_k_accuracy"])


def _format_time(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else "< 1 min"


def check_state(
    checkpoint: Mapping[str, Any], weights: Mapping[str, Tensor], optimizers: Mapping[str, Any]
) -> None:
    """Raise ValueError where a checkpoint is not of a drafter with these weights.

    Values of wrong types raise whatever errors follow.
    """
    for name in ("step", "num_tokens"):
        if type(checkpoint[name]) is not int or checkpoint[name] < 0:
            raise ValueError(f"{name} is no count")
    shapes = {name: tensor.shape for name, tensor in checkpoint["drafter"].items()}
    if shapes != {name: tensor.shape for name, tensor in weights.items()}:
        raise ValueError("the weights are of another drafter")
    check_states(checkpoint, optimizers)


def count_steps(settings: TrainSettings, num_rows: int, rows_per_step: int) -> int:
    """Return the number of optimizer steps of the training."""
    if settings.max_steps is not None:
        return settings.max_steps
    num_epochs = 2.0 if settings.num_epochs is None else settings.num_epochs
    return max(1, math.ceil(num_epochs * num_rows / rows_per_step))
