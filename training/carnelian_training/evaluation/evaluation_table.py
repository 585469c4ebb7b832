"""Rendering of an evaluation as text."""

from carnelian_training.evaluation.evaluate import Evaluation


def render(evaluation: Evaluation) -> str:
    """Render WER and CER for each source that the manifest names, and for all clips together."""
    lines = []
    for source in [*evaluation.sources(), None]:
        rates = evaluation.error_rates(source)
        counts = f"{rates.clips:>6} clips {rates.words:>7} words"
        shares = f"WER {rates.wer:7.2%}  CER {rates.cer:7.2%}"
        if not rates.words:
            shares = f"WER {'-':>7}  CER {'-':>7}  {rates.insertions} words inserted"
        lines.append(f"{'all' if source is None else source or repr(source):<32} {counts}  {shares}")
    return "\n".join(lines)


def render_mistakes(evaluation: Evaluation, most: int) -> str:
    """Render the most frequent substitutions, deletions and insertions, and the worst clips."""
    rates, mistakes = evaluation.error_rates(), evaluation.mistakes(most)
    lines = [f"substitutions {rates.substitutions}, deletions {rates.deletions}, insertions {rates.insertions}"]
    lines += [f"{count:>6}  {said} -> {heard}" for (said, heard), count in mistakes.substitutions]
    lines += [f"{count:>6}  {word} -> (nothing)" for word, count in mistakes.deletions]
    lines += [f"{count:>6}  (nothing) -> {word}" for word, count in mistakes.insertions]
    for wer, clip, heard in mistakes.worst:
        lines += ["", f"WER {wer:.0%}  {clip.title}", f"  reference  {clip.text}", f"  heard      {heard}"]
    return "\n".join(lines)
