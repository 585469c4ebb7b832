"""Language models through the command and the loop that train everything."""

import json
import math
import random

import pytest
import torch
from carnelian_training.checkpoint import average, build_network, load, load_language_model, load_model, save
from carnelian_training.cli import main
from carnelian_training.config_errors import ConfigError
from carnelian_training.config_tree import config_to_dict
from carnelian_training.distributed import Process
from carnelian_training.language_models.perplexity import measure_perplexity
from carnelian_training.language_models.streams import Streams
from carnelian_training.language_models.task import LanguageModelling
from carnelian_training.language_models.tokens import END, TokenConfig, Tokenizer, train_tokenizer
from carnelian_training.loop.finetune import start_from_checkpoint
from carnelian_training.loop.metrics import read_metrics
from carnelian_training.loop.state import new_state
from carnelian_training.loop.train import optimise, train
from carnelian_training.run_config import load_run, run_from_dict
from carnelian_training.text import LABEL_CHARACTERS
from carnelian_training.weight_files import CheckpointError
from sentencepiece import SentencePieceProcessor

NOUNS = ["cat", "dog", "king", "queen", "ship", "harbour", "letter"]
UKRAINIAN = " абвгґдеєжзиіїйклмнопрстуфхцчшщьюя'"
CPU = Process(torch.device("cpu"))


def metrics(directory):
    records = read_metrics(directory / "metrics.jsonl")
    return [{k: v for k, v in record.items() if not k.endswith("_per_s")} for record in records]


def test_a_run_whose_text_has_changed_says_that_it_rates_itself_anew(tree, text, tmp_path, caplog, changed):
    """What was held out before may be learnt now, and the other way round."""
    copy = tmp_path / "text.txt"
    copy.write_text(text.read_text())
    config = run_from_dict(tree | {"text": tree["text"] | {"sources": [str(copy)]}}, "here")
    train(config, tmp_path / "run")
    longer = changed(config, loop={"steps": 9})
    copy.write_text("A sentence before all others.\n" + text.read_text())
    train(longer, tmp_path / "run")
    assert "the texts are others than before" in caplog.text
    caplog.clear()
    train(changed(config, loop={"steps": 12}), tmp_path / "run")
    assert "the texts are others than before" not in caplog.text


@pytest.mark.parametrize("labels", [LABEL_CHARACTERS, UKRAINIAN, "книга цепшт"])
@pytest.mark.parametrize("kind", ["unigram", "char"])
def test_tokens_spell_every_word_in_the_labels(kind, labels):
    nouns = NOUNS if labels == LABEL_CHARACTERS else ["книга", "пташка"]
    sentences = [" ".join([noun, other, noun]) for noun in nouns for other in nouns] * 9
    config = TokenConfig(kind=kind, size=len(labels) + 3 if kind == "unigram" else None)
    tokenizer = train_tokenizer(sentences, config, labels)
    assert tokenizer.characters == {*labels} - {" "}
    processor = SentencePieceProcessor(model_proto=tokenizer.model)
    assert processor.vocab_size() == config.vocabulary(labels)
    assert tokenizer.model == train_tokenizer(sentences, config, labels).model
    said = ["".join(random.Random(0).choices(labels.strip(), k=40)).replace(" ", ""), " ".join(nouns), ""]
    encoded = Tokenizer(tokenizer.model).encode(said)
    assert processor.decode(encoded) == said
    assert all(token > END for tokens in encoded for token in tokens)


def test_too_many_tokens_for_a_text_are_refused_in_words():
    with pytest.raises(ValueError, match="large enough for 500 tokens, but 1 sentences are not"):
        train_tokenizer(["the cat"], TokenConfig(size=500), LABEL_CHARACTERS)


def test_a_seed_may_be_negative(config):
    """As PyTorch and Python's `random` take them; NumPy does not."""
    streams = Streams([[2, 3]] * 99, config.text)
    assert next(streams.segments(-1, 0, 0))


def test_an_epoch_reads_every_stream_in_order_once(config, changed):
    sentences = [[i % 7 + 2] * (i % 5 + 1) for i in range(99)]
    streams = Streams(sentences, changed(config, text={"context_share": 0.0}).text)
    flat = [token for sentence in sentences for token in (END, *sentence)] + [END]
    rows = [[], [], [], []]
    for items, (whole,) in streams.segments(1, 0, 0):
        assert len(items) == 4
        for i, (row, tokens, targets) in enumerate(
            zip(rows, whole.tokens.tolist(), whole.targets.tolist(), strict=True)
        ):
            assert row[-1:] in ([], tokens[:1])
            row[-1:] = [*tokens, targets[-1]]
            for token, reach in zip(tokens, whole.reach[i].tolist(), strict=True):
                assert token != END or reach == 0
    doubled = " ".join(map(str, flat[:-1] + flat[:-1]))
    assert all(" ".join(map(str, row)) in doubled for row in rows)
    joined = [token for row in rows for token in row[:-1]]
    assert len(joined) == 384  # of 394 tokens, in steps of 4 streams by 12
    assert " ".join(map(str, joined)) in doubled
    first, other = ([s.tokens.tolist() for _, (s,) in streams.segments(1, epoch, 0)] for epoch in (0, 1))
    assert first == [s.tokens.tolist() for _, (s,) in streams.segments(1, 0, 0)]
    assert first != other


def test_processes_and_parts_share_the_streams(config, changed):
    sentences = [[i % 7 + 2] * (i % 5 + 1) for i in range(99)]
    whole = next(Streams(sentences, config.text).segments(1, 0, 2))[1][0]
    streams = Streams(sentences, changed(config, text={"device_streams": 1}).text)
    for rank in (0, 1):
        items, parts = next(streams.segments(1, 0, 2, rank, 2))
        assert len(items) == 4
        assert len(parts) == 2
        assert torch.equal(torch.cat([part.tokens for part in parts]), whole.tokens[rank::2])
        assert [part.rows for part in parts] == [slice(0, 1), slice(1, 2)]
        assert [part.items[0].stream for part in parts] == [rank, rank + 2]


def test_parts_make_no_difference(config, changed):
    losses = []
    for text in ({}, {"device_streams": 1}):
        run = changed(config, text=text, model={"dropout": 0.0})
        state, task = new_state(run, CPU), LanguageModelling(run)
        task.prepare(state)
        found = []
        for share in task.shares(state):
            found.append(optimise(state, share, run).loss)
            state.step += 1
            if state.step == 4:
                break
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_a_run_learns_and_reports_perplexities(config, trained):
    records = metrics(trained)
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[-1] < losses[0] < math.log(60) + 1
    evaluations = [record for record in records if "dev_word_perplexity" in record]
    assert [record["step"] for record in evaluations] == [3, 6]
    assert evaluations[-1]["dev_perplexity"] < evaluations[-1]["dev_word_perplexity"]
    assert (trained / "tiny.png").exists()
    best = load(trained / "tiny.pt")[1]["results"]
    assert best["dev_word_perplexity"] == min(record["dev_word_perplexity"] for record in evaluations)


def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(config, changed, trained, tmp_path):
    train(changed(config, loop={"steps": 4, "checkpoint_every_steps": 2}), tmp_path)
    train(config, tmp_path)
    whole, parts = (load(directory / "tiny-00000006.pt")[1] for directory in (trained, tmp_path))
    for name, tensor in whole["weights"].items():
        assert torch.equal(parts["weights"][name], tensor), name
    assert torch.equal(parts["training"]["memory"], whole["training"]["memory"])
    resumed = {record["step"]: record for record in metrics(tmp_path) if "loss" in record}
    assert [record for record in metrics(trained) if "loss" in record] == list(resumed.values())
    with pytest.raises(ConfigError, match=r"text\.segment"):
        train(changed(config, text={"segment": 6}), tmp_path)


def test_processes_make_no_difference_and_may_change_in_between(config, changed, tmp_path, call, second_process):
    config = changed(config, model={"dropout": 0.0})
    train(config, tmp_path / "one")
    (tmp_path / "tiny.yaml").write_text(json.dumps(config_to_dict(config)))
    arguments = ("fit", tmp_path / "tiny.yaml", "--set", "loop.steps=4", "--out", tmp_path / "two")
    with second_process("-m", "carnelian_training.cli", *arguments) as second:
        status, _, err = call(main, *arguments)
        second.communicate(timeout=60)
    assert (status, second.returncode) == (0, 0), err
    assert [record["step"] for record in metrics(tmp_path / "two") if "loss" in record] == [1, 2, 3, 4]
    train(config, tmp_path / "two")
    losses = [[r["loss"] for r in metrics(tmp_path / run) if "loss" in r] for run in ("one", "two")]
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)
    whole, parts = (load(tmp_path / run / "tiny-00000006.pt")[1]["training"]["memory"] for run in ("one", "two"))
    torch.testing.assert_close(parts, whole, atol=1e-3, rtol=1e-2)


def test_publishing_keeps_the_tokenizer(trained, tmp_path, call):
    assert call(main, "publish", trained / "tiny.pt", tmp_path / "small.pt")[0] == 0
    (_, whole), (_, small) = (load_language_model(path) for path in (trained / "tiny.pt", tmp_path / "small.pt"))
    assert whole.tokenizer == small.tokenizer != b""
    sentences = ["the king saw the ship"]
    assert measure_perplexity(small, sentences, 9).per_word == pytest.approx(
        measure_perplexity(whole, sentences, 9).per_word, rel=0.01
    )


def test_fine_tuning_takes_over_the_tokens(changed, tree, trained, text, tmp_path):
    tuned = {name: tree[name] for name in ("optimizer", "loop")}
    tuned |= {"name": "tuned", "init": {"checkpoint": str(trained / "tiny.pt")}}
    tuned["text"] = {"sources": [str(text)], "streams": 2, "segment": 9}
    (tmp_path / "tuned.yaml").write_text(json.dumps(tuned))
    run = load_run(tmp_path / "tuned.yaml")
    train(changed(run, loop={"steps": 1}), tmp_path / "run")
    (_, before), (_, after) = (load_language_model(p) for p in (trained / "tiny.pt", tmp_path / "run" / "tuned.pt"))
    assert before.tokenizer == after.tokenizer
    assert before.embedding.weight.shape == after.embedding.weight.shape


def test_fine_tuning_another_size_is_refused_by_name(tree, trained):
    other = tree | {"init": {"checkpoint": str(trained / "tiny.pt")}}
    other["model"] = tree["model"] | {"feed_forward": 3}
    run = run_from_dict(other, "here")
    with pytest.raises(
        CheckpointError, match=r"does not fit this run's network.*\n  `model.feed_forward` is 3, in the checkpoint"
    ):
        start_from_checkpoint(build_network(run), run)


def test_fine_tuning_reads_the_text_of_its_checkpoints_language(tree, tmp_path):
    german = tree | {"text": tree["text"] | {"labels": " abcdefghijklmnopqrstuvwxyzäöüß"}}
    config = run_from_dict(german, "here")
    save(tmp_path / "german.pt", config, build_network(config).state_dict(), results={})
    (tmp_path / "tuned.yaml").write_text(f"name: tuned\ninit: {{checkpoint: {tmp_path / 'german.pt'}}}\n")
    run = load_run(tmp_path / "tuned.yaml")
    assert run.text.labels == config.text.labels
    (tmp_path / "whole.yaml").write_text(json.dumps(config_to_dict(run)))
    (tmp_path / "german.pt").unlink()
    assert load_run(tmp_path / "whole.yaml") == run


def test_fine_tuning_on_other_labels_than_the_tokens_is_refused(tree, trained):
    tuned = tree | {"init": {"checkpoint": str(trained / "tiny.pt")}}
    tuned["text"] = tree["text"] | {"labels": LABEL_CHARACTERS.replace("q", "ä")}
    run = run_from_dict(tuned, "here")
    state = new_state(run, CPU)
    start_from_checkpoint(state.model, run)
    with pytest.raises(ValueError, match=r"`text\.labels` must be the characters of the tokens.*'qä'"):
        LanguageModelling(run).prepare(state)


def test_each_kind_of_checkpoint_is_refused_where_the_other_is_needed(trained, tiny_config, tmp_path, call, changed):
    from carnelian_training.checkpoint import build_model

    with pytest.raises(CheckpointError, match="must be a recogniser, but is a language model"):
        load_model(trained / "tiny.pt")
    save(tmp_path / "tiny.pt", tiny_config, build_model(tiny_config).state_dict(), results={})
    with pytest.raises(CheckpointError, match="must be a language model, but is a recogniser"):
        load_language_model(tmp_path / "tiny.pt")
    status, _, err = call(main, "evaluate", trained / "tiny.pt", "dev.jsonl")
    assert status == 1
    assert "must be a recogniser" in err
    with pytest.raises(CheckpointError, match=r"`init\.checkpoint` must be of a quartznet"):
        train(changed(tiny_config, init={"checkpoint": trained / "tiny.pt"}), tmp_path / "run")
    (tmp_path / "a.yaml").write_text(f"name: a\ninit: {{checkpoint: {trained / 'tiny.pt'}}}\nlabels: [a, b]\n")
    with pytest.raises(ConfigError, match=r"^`init\.checkpoint` must be of a recogniser, as `labels` says, but .*_xl"):
        load_run(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.width=17", "model: `width` must be even"),
        ("model.steps=3", "model.steps: unknown key"),
        ("text.tokens.size=3", "text: `tokens.size` must be at least 31"),
        ("text.labels=' абвгґдеєжзиіїйклмнопрстуфхцчшщьюяabcdefghijklmnopqrstuvwxyz'", "must be at least 63"),
        ("text.labels=你好", "text: `labels` must hold the space"),
        ("text.labels=' abcABC'", "text: `labels` must be of one case"),
        ("text.tokens.kind=char", "`size` must be given for subwords and for them alone"),
        ("model.cutoffs=[60]", "`model.cutoffs` must be below the 60 tokens"),
        ("loop.recompute=true", "loop.recompute"),
        ("text.exclude=['']", "text.exclude.0: a path must not be empty"),
        ("data.batch_s=3", "data: unknown key"),
    ],
)
def test_mistakes_are_named_by_their_place(tree, tmp_path, override, words):
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(tree))
    with pytest.raises(ConfigError) as caught:
        load_run(path, (override,))
    assert words in str(caught.value)


@pytest.mark.parametrize("kernels", ["pytorch", "triton"])
def test_what_computes_depthwise_convolutions_is_no_matter(tree, tmp_path, kernels):
    """The default was another once, and resolved configurations and checkpoints hold it."""
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(tree))
    assert load_run(path, (f"loop.depthwise={kernels}",)).loop.depthwise == kernels


@pytest.mark.parametrize(
    ("content", "message"), [("", r"must hold sentences that can be used"), ("a cat", r"must be large enough")]
)
def test_a_text_of_next_to_nothing_is_refused_in_words(config, changed, tmp_path, content, message):
    (tmp_path / "short.txt").write_text(content)
    with pytest.raises(ValueError, match=message):
        train(changed(config, text={"sources": (str(tmp_path / "short.txt"),)}), tmp_path / "run")


def test_a_text_that_is_too_short_is_refused_in_words(config, changed, tmp_path):
    (tmp_path / "short.txt").write_text("\n".join(f"The cat saw {i} quick brown foxes jump." for i in range(40)))
    short = changed(
        config,
        text={"sources": (str(tmp_path / "short.txt"),), "streams": 64, "segment": 64, "tokens": TokenConfig(size=40)},
    )
    with pytest.raises(ValueError, match=r"must hold a step of 64 `text\.streams` by 64 tokens"):
        train(short, tmp_path / "run")


def test_a_configuration_survives_its_checkpoint(config):
    assert run_from_dict(config_to_dict(config), "there") == config


def test_what_was_not_finite_is_not_remembered(config):
    state, task = new_state(config, CPU), LanguageModelling(config)
    task.prepare(state)
    coming = task.shares(state)
    assert optimise(state, next(coming), config).is_finite
    weights = {name: parameter.detach().clone() for name, parameter in state.model.named_parameters()}
    with torch.no_grad():
        state.model.embedding.weight[:] = torch.nan
    assert not optimise(state, next(coming), config).is_finite
    state.model.load_state_dict(weights, strict=False)
    assert optimise(state, next(coming), config).is_finite


def test_an_epoch_begins_without_memory(config):
    state, task = new_state(config, CPU), LanguageModelling(config)
    task.prepare(state)
    state.batch, state.memory = task.streams.steps - 1, torch.zeros(1)
    coming = task.shares(state)
    next(coming)
    assert (state.epoch, state.batch, state.memory is None) == (0, task.streams.steps, False)
    next(coming)
    assert (state.epoch, state.batch, state.memory is None) == (1, 1, True)


def test_an_average_has_the_tokens_too(config, changed, tmp_path):
    averaged = changed(config, optimizer={"ema": 0.9}, loop={"steps": 1})
    train(averaged, tmp_path)
    _, network = load_language_model(tmp_path / "tiny.pt")
    assert Tokenizer(network.tokenizer).encode(["the king"]) != [[]]


@pytest.mark.parametrize("change", [lambda found: found[None], lambda found: found.float()], ids=["table", "float"])
def test_a_tokenizer_is_bytes(trained, tmp_path, change):
    config, content = load(trained / "tiny.pt")
    weights = content["weights"] | {"_extra_state": change(content["weights"]["_extra_state"])}
    save(tmp_path / "x.pt", config, weights, results={})
    with pytest.raises(CheckpointError, match=r"x\.pt: 1 tensor\(s\) .*\n  _extra_state: must be bytes, but is \["):
        load(tmp_path / "x.pt")


def test_networks_of_other_tokens_are_not_averaged(trained, tmp_path):
    config, content = load(trained / "tiny.pt")
    weights = dict(content["weights"])
    weights["_extra_state"] = weights["_extra_state"].flip(0)  # as long
    save(tmp_path / "other.pt", config, weights, results={})
    with pytest.raises(CheckpointError, match=r"other\.pt must be of the same network as .* differs in its tokens$"):
        average([tmp_path / "other.pt", trained / "tiny.pt"], tmp_path / "mean.pt")
