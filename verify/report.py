"""Report of `verify_engine` as lines of text and as an error."""

from __future__ import annotations

from typing import Any

from specdec.errors import SpecDecError
from specdec.model.blocks import GGUF
from specdec.text.comparison import name_token

MAX_LINES = 12  # divergences that are printed; the JSON has all of them
END_HINT = "check eos_token_id in generation_config.json"
READING_HINT = (
    "build the engine again with --tokenizer-dir MODEL; if it still differs, this is a fault in"
    " specdec: report it with this message"
)
WITHOUT_DRAFTS = ("with drafts", "without")  # labels of an engine's two texts
CAUSES = {
    "rounding": "a near-tie",
    "logits": "the engine computes other logits",
    "choice": "the engine's own logits prefer another token",
}


def format_verdict(verdict: str, dtype: str) -> str:
    """Return PASS or FAIL, the beginning of a report."""
    half = dtype if dtype == "float32" else "half precision"
    return {
        "exact": "PASS",
        "near-ties": f"PASS (near-ties in {half})",
        "lossy": "PASS (the engine's own text: its weights are quantized)",
    }.get(verdict, "FAIL")


def format_report(report: dict[str, Any]) -> str:
    """Return a report as lines of text."""
    divergences, alone, kind = report["divergences"], report["alone"], report.get("quantization")
    num_differing = sum(f["is_first"] and f["run"] == "batch" for f in divergences)
    lines = [
        f"{format_verdict(report['verdict'], report['dtype'])}: {report['engine_dir']}:"
        f" {report['verdict']}",
        f"  {report['method']} in {report['dtype']}{f' with {kind} weights' if kind else ''} on"
        f" {report['device']}{describe_comparison(report)}",
        f"  greedy: {report['num_tokens']} tokens compared, the runs alone included;"
        f" {report['prompts']} prompts, {report['prompts'] - num_differing} texts equal,"
        f" {report['acceptance_length']:.2f} tokens per verify step, drafts in"
        f" {report['num_drafted_steps']} steps of the batch",
        f"  run alone: {alone['prompts']} prompts, {alone['same']} with the text of the batch",
    ]
    if kind is None:
        lines += format_logits(report)
    lines += format_divergences(divergences, () if kind is None else WITHOUT_DRAFTS)
    lines += [f"  {fact}" for fact in report["wrong_ends"] + report["wrong_readings"]]
    if kind is not None:
        lines += format_distance(report)
    elif report["sampling"] is not None:
        lines += [f"  {line}" for line in format_sampling(report["sampling"])]
    return "\n".join(lines)


def describe_comparison(report: dict[str, Any]) -> str:
    """Return the end of a sentence that names the text which the engine's is compared with."""
    kind = report.get("quantization")
    if kind is None:
        return f", against {report['model_dir']} run by transformers"
    difference = f"not the weights of {report['model_dir']}"
    if kind == GGUF:
        difference = "inputs of products are rounded, as transformers does not"
    return f": {difference}, so its text is compared with its own text without speculation"


def format_logits(report: dict[str, Any]) -> list[str]:
    """Return the distance of an engine's logits from the model's, as lines."""
    lines = [
        f"  logits: within {report['logit_difference']:.3g} of the model's; two tie within"
        f" {report['logit_bound']:.3g} there ({report['near_tie_spacings']} spacings of"
        f" {report['dtype']})"
    ]
    if not report["logit_difference"] <= report["logit_bound"]:
        lines.append("  note: that is more than rounding; the texts alone decide the verdict")
    if (sentence := describe_layers(report)) is not None:
        lines.append(f"  layers: {sentence}")
    return lines


def describe_layers(report: dict[str, Any]) -> str | None:
    """Return what the comparison of layers found; None where they were not compared."""
    if (layers := report.get("layers")) is None or not layers["num_tokens"]:
        return None
    if (first := layers["first"]) is not None:
        return (
            f"{first['name']} differs first ({first['module']} of the model):"
            f" {first['difference']:.3g} at token {first['token']}, where"
            f" {first['tolerance']:.3g} is allowed; from the model's own input, in"
            f" {first['tokens']} of {layers['num_tokens']} tokens"
        )
    if layers["plain_is_right"]:
        return (
            f"each part of each layer computes the model's numbers for {layers['num_tokens']}"
            " tokens read at once: the difference comes with drafts, batches, or from the cache"
        )
    return (
        "each part of each layer computes the model's numbers from the model's own input: the"
        " difference grows over the layers, or comes from the kernel that runs them in one call"
    )


def format_divergences(divergences: list[dict[str, Any]], labels: tuple[str, ...]) -> list[str]:
    """Return the first divergences as lines, and the number of the others."""
    lines = [f"  {describe_divergence(f, *labels)}" for f in divergences[:MAX_LINES]]
    if len(divergences) > MAX_LINES:
        num_wrong = sum(not f["near_tie"] for f in divergences)
        lines.append(
            f"  {len(divergences) - MAX_LINES} more; of all {len(divergences)}, {num_wrong} are not"
            " near-ties"
        )
    return lines


def format_distance(report: dict[str, Any]) -> list[str]:
    """Return the distance of an engine with its own arithmetic from the model, as lines."""
    distance = report["distance"]
    num_tokens, differences = distance["num_tokens"], distance["first_differences"]
    lines = [
        f"  from {report['model_dir']} run by transformers in {distance['dtype']}:"
        f" {distance['same_choice']} of {num_tokens} tokens"
        f" ({distance['same_choice'] / num_tokens:.1%}) have the same best token; KL divergence"
        f" {distance['mean_divergence']:.3g} on average, {distance['largest_divergence']:.3g} at"
        f" most; {distance['same_texts']} of {report['prompts']} texts equal",
        *(
            f"  prompt {f['prompt']}, position {f['position']}: the engine writes"
            f" {_name(f, 'engine')}, the model {_name(f, 'model')}, whose logit is"
            f" {f['margin']:.3g} higher there"
            for f in differences[:MAX_LINES]
        ),
    ]
    if len(differences) > MAX_LINES:
        lines.append(f"  {len(differences) - MAX_LINES} more texts differ")
    return lines


def describe_divergence(
    divergence: dict[str, Any],
    engine_label: str = "the engine wrote",
    model_label: str = "the model",
) -> str:
    """Return a divergence as one line; each label stands before its side's token."""
    run = "" if divergence["run"] == "batch" else " alone"
    suffix = "" if divergence["is_first"] else " (after the first difference)"
    return (
        f"prompt {divergence['prompt']}{run}, position {divergence['position']}{suffix}:"
        f" {engine_label} {_name(divergence, 'engine')}, {model_label}"
        f" {_name(divergence, 'model')}; margin {divergence['margin']:.3g}, bound"
        f" {divergence['bound']:.3g}: {CAUSES[divergence['cause']]}"
    )


def _name(divergence: dict[str, Any], side: str) -> str:
    return name_token(divergence[f"{side}_token"], divergence[f"{side}_text"])


def format_sampling(sampling: dict[str, Any]) -> list[str]:
    """Return the sampling tests as lines of text."""
    lines = [
        f"sampling: {sampling['verdict']}; temperature {sampling['temperature']:g}, top-k"
        f" {sampling['top_k']}, first {sampling['num_tokens']} tokens; a right engine fails once"
        f" in {1 / sampling['false_alarm_rate']:g} calls"
    ]
    for test in sampling["tests"]:
        start = f"  prompt {test['prompt']}: {test['requests']} requests"
        if test["impossible"]:
            lines.append(f"{start}, {test['impossible']} wrote what the model cannot")
        elif test["p_value"] is None:
            lines.append(f"{start}, untested: too few texts are possible")
        else:
            lines.append(
                f"{start}, {test['num_cells']} cells, p = {test['p_value']:.3g}; a distribution"
                f" {test['detectable_distance']:.1%} away (total variation) would be found with"
                f" {sampling['power']:.0%}"
            )
    if seed_comparison := sampling["same_seeds"]:
        allowed_text = (
            "" if seed_comparison["allowed"] is None else f", {seed_comparison['allowed']} allowed"
        )
        lines.append(
            f"  equal seeds without speculation: {seed_comparison['different']} of"
            f" {seed_comparison['texts']} texts differ{allowed_text}"
        )
    return lines


def find_error(report: dict[str, Any]) -> SpecDecError | None:
    """Return the error of a report whose verdict is `differs`, with the first fact."""
    if report["verdict"] != "differs":
        return None
    pair = f"{report['engine_dir']} differs from {report['model_dir']}"
    if with_itself := report.get("quantization") is not None:
        pair = f"{report['engine_dir']} with speculation differs from itself without"
    divergences = [divergence for divergence in report["divergences"] if not divergence["near_tie"]]
    if divergences:
        error = _make_text_error(pair, divergences, with_itself=with_itself)
        sentence = describe_layers(report)
        if sentence is None:
            return error
        return SpecDecError(f"{error.message}; {sentence}", error.hint)
    if report["wrong_ends"]:
        return SpecDecError(f"{pair}: {report['wrong_ends'][0]}", END_HINT)
    if report["wrong_readings"]:
        return SpecDecError(f"{pair} in its tokenizer: {report['wrong_readings'][0]}", READING_HINT)
    facts = format_sampling(report["sampling"])
    return SpecDecError(
        f"{pair} in sampled text: {'; '.join(fact.strip() for fact in facts)}",
        "repeat with another --random-seed and more --num-samples; if it fails again, report it",
    )


def _make_text_error(
    pair: str, divergences: list[dict[str, Any]], *, with_itself: bool
) -> SpecDecError:
    """Return the error of greedy texts that differ by more than near-ties.

    pair: the engine and its reference, as the beginning of a sentence. with_itself: whether the
    engine was compared with itself, without speculation.
    """
    suffix = f", and {len(divergences) - 1} more tokens" if len(divergences) > 1 else ""
    hint = "convert and build the engine again from this model"
    if with_itself:
        hint = "this is a fault in specdec; report it with this message"
    elif divergences[0]["cause"] == "choice":
        hint = "this is a fault in specdec's accept rule; report it with this message"
    labels = WITHOUT_DRAFTS if with_itself else ()
    return SpecDecError(f"{pair}: {describe_divergence(divergences[0], *labels)}{suffix}", hint)
