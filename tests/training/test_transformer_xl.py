"""The network alone, in tiny sizes and random weights."""

import math

import pytest
import torch
from carnelian_training.language_models.perplexity import score_sentences
from carnelian_training.language_models.tokens import END
from carnelian_training.models import transformer_xl
from carnelian_training.models.transformer_xl import TransformerXl, TransformerXlConfig, relative_shift
from torch.nn import functional as F

VOCABULARY = 23
SENTENCES = [[], [5], [7, 2, 9], list(range(2, 22)), [4, 4, 4, 4, 4, 4, 4]]


def network(**changes):
    torch.manual_seed(0)
    config = TransformerXlConfig(**({"width": 16, "layers": 3, "heads": 2, "feed_forward": 24, "memory": 6} | changes))
    model = TransformerXl(config, VOCABULARY)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # biases and distances have to count
    return model.eval()


@pytest.fixture(params=[{}, {"norm_first": True}, {"cutoffs": (5, 11)}], ids=["published", "norm_first", "adaptive"])
def model(request):
    return network(**request.param)


def test_the_standard_model_has_the_published_size():
    with torch.device("meta"):
        large = TransformerXl(TransformerXlConfig(cutoffs=(20_000, 40_000, 200_000)), 267_735)
        characters = TransformerXl(TransformerXlConfig(width=512, layers=12, heads=8, feed_forward=2048), 204)
    assert sum(p.numel() for p in large.parameters()) == 151_107_538  # 151M in table 1
    assert sum(p.numel() for p in characters.parameters()) == 41_055_436  # 41M in table 2


def test_stages_are_the_embedding_and_the_layers_and_the_rest_is_behind_them():
    config = network().config
    assert config.stage_of("embedding.weight") == 0
    assert [config.stage_of(f"layers.{i}.widen.bias") for i in range(3)] == [1, 2, 3]
    assert config.stage_of("token_bias") == config.num_stages == 4


def test_the_shift_puts_each_distance_where_it_belongs():
    scores = torch.randn(2, 3, 4, 7)
    shifted = relative_shift(scores)
    for i in range(4):
        for j in range(3 + i + 1):
            distance = 3 + i - j
            assert torch.equal(shifted[:, :, i, j], scores[:, :, i, 6 - distance])


def test_attention_is_what_the_paper_writes_for_each_pair():
    model = network(layers=1)
    attention, biases = model.layers[0].attention, model.biases
    x, remembered = torch.randn(1, 4, 16), torch.randn(1, 3, 16)
    seen = torch.cat([remembered, x], 1)
    encodings, hidden = model._geometry(4, 3, None, x.device)
    found = attention(x, seen, encodings, hidden, biases)
    key_weight, value_weight = attention.key_value.weight.chunk(2)
    expected = torch.zeros(4, 16)
    for head in range(2):
        part = slice(head * 8, head * 8 + 8)
        for i in range(4):
            query = attention.query(x[0, i])[part]
            scores = []
            for j in range(3 + i + 1):
                distance = float(3 + i - j)
                rates = [10000 ** (-2 * k / 16) for k in range(8)]
                encoding = torch.tensor(
                    [math.sin(distance * r) for r in rates] + [math.cos(distance * r) for r in rates]
                )
                key, position = (key_weight @ seen[0, j])[part], (attention.distance.weight @ encoding)[part]
                # Equation (d) of section 3.3: content and position, each with the query and with its bias.
                score = (query + biases[0, head, 0]) @ key + (query + biases[1, head, 0]) @ position
                scores.append(score / math.sqrt(8) if distance <= 6 else -torch.inf)
            weights = torch.stack([torch.as_tensor(score) for score in scores]).softmax(0)
            values = torch.stack([(value_weight @ seen[0, j])[part] for j in range(len(scores))])
            expected[i, part] = weights @ values
    torch.testing.assert_close(found[0], attention.output(expected))


@pytest.mark.parametrize("segment", [1, 4, 7, 20])
def test_segments_with_memory_say_what_one_long_segment_says(model, segment):
    tokens = torch.randint(0, VOCABULARY, (2, 21))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    whole, _ = model(inputs, targets)
    memory, parts = None, []
    for start in range(0, 20, segment):
        time = slice(start, start + segment)
        log_probs, memory = model(inputs[:, time], targets[:, time], None, memory)
        parts.append(log_probs)
        assert memory.shape[2] <= 6
        assert not memory.requires_grad
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_the_first_layer_reads_and_remembers_scaled_embeddings(model):
    tokens = torch.randint(0, VOCABULARY, (2, 5))
    _, memory = model(tokens, tokens)
    torch.testing.assert_close(memory[0], model.embedding(tokens) * math.sqrt(16))


def test_the_memory_matters_and_ends_where_it_should(model):
    tokens = torch.randint(0, VOCABULARY, (1, 30))
    far, near = tokens.clone(), tokens.clone()
    far[0, 0] = (far[0, 0] + 1) % VOCABULARY
    near[0, 9] = (near[0, 9] + 1) % VOCABULARY
    said = [model(t[:, :-1], tokens[:, 1:])[0][0] for t in (tokens, far, near)]
    assert torch.equal(said[1][19:], said[0][19:])  # three layers reach 3 x 6 tokens back
    assert not torch.equal(said[1][:19], said[0][:19])
    assert not torch.equal(said[2][10:15], said[0][10:15])
    assert torch.equal(said[2][:9], said[0][:9])


def test_probabilities_add_up_to_one(model):
    tokens = torch.randint(0, VOCABULARY, (VOCABULARY, 1))[:1].expand(VOCABULARY, 4)
    targets = torch.arange(VOCABULARY)[:, None].expand(VOCABULARY, 4)
    log_probs, _ = model(tokens, targets)
    torch.testing.assert_close(log_probs.exp().sum(0), torch.ones(4))


def test_the_adaptive_softmax_learns_like_a_softmax():
    model = network(cutoffs=(5, 11))
    x = torch.randn(40, 16, requires_grad=True)
    targets = torch.arange(40) % VOCABULARY
    groups = torch.bucketize(targets, torch.tensor([5, 11]), right=True)
    first = F.linear(x, torch.cat([model.embedding.weight[:5], model.group_weight]))
    first = (first + torch.cat([model.token_bias[:5], model.group_bias])).log_softmax(1)
    expected = []
    for i, (target, group) in enumerate(zip(targets.tolist(), groups.tolist(), strict=True)):
        if group == 0:
            expected.append(first[i, target])
            continue
        start, end = ((5, 11), (11, VOCABULARY))[group - 1]
        tail = (model.embedding.weight[start:end] @ x[i] + model.token_bias[start:end]).log_softmax(0)
        expected.append(first[i, 4 + group] + tail[target - start])
    found = model.score(x, targets)
    torch.testing.assert_close(found, torch.stack(expected))


def test_a_sentence_does_not_see_its_neighbours(model):
    together = score_sentences(model, SENTENCES, segment=5)
    alone = torch.cat([score_sentences(model, [sentence], segment=100) for sentence in SENTENCES])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=0)


def test_sentences_that_begin_anew_in_a_stream_say_what_they_say_alone(model):
    stream = torch.tensor([[token for sentence in SENTENCES for token in (END, *sentence)] + [END]])
    starts = [i for i, token in enumerate(stream[0, :-1].tolist()) if token == END]
    since = torch.tensor([[i - max(s for s in starts if s <= i) for i in range(stream.shape[1] - 1)]])
    log_probs, _ = model(stream[:, :-1], stream[:, 1:], since)
    ends = [*starts[1:], stream.shape[1] - 1]
    said = torch.stack([log_probs[0, start:end].sum() for start, end in zip(starts, ends, strict=True)])
    torch.testing.assert_close(said.double(), score_sentences(model, SENTENCES, segment=50), atol=1e-4, rtol=0)


def test_a_network_without_opinion_has_a_perplexity_of_its_vocabulary():
    model = network()
    torch.nn.init.zeros_(model.embedding.weight)
    torch.nn.init.zeros_(model.token_bias)
    found = score_sentences(model, SENTENCES, segment=3)
    expected = [-(len(sentence) + 1) * math.log(VOCABULARY) for sentence in SENTENCES]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_every_parameter_learns(model):
    model.train()
    tokens = torch.arange(46).view(2, 23) % VOCABULARY
    log_probs, _ = model(tokens[:, :-1], tokens[:, 1:])
    log_probs.sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()] == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"heads": 3}, "multiple of `heads`"),
        ({"memory": 0}, "`memory` must be at least 1"),
        ({"cutoffs": (11, 5)}, "must be positive and rise"),
        ({"dropout": 1.0}, "below 1"),
    ],
)
def test_impossible_sizes_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        network(**changes)


def test_dropout_is_where_the_released_code_has_it(monkeypatch):
    dropped = []

    def spy(x, probability, training):
        dropped.append((list(x.shape), probability, training))
        return x

    monkeypatch.setattr(transformer_xl, "dropout", spy)
    model = network(layers=1, dropout=0.2, attention_dropout=0.3)
    tokens = torch.tensor([[1, 2, 3, 4]])
    for is_training in (True, False):
        model.train(is_training)(tokens, tokens)
        each = {"embedding": [1, 4, 16], "distances": [4, 16], "attention": [1, 2, 4, 4], "attended": [1, 4, 16]}
        each |= {"widened": [1, 4, 24], "narrowed": [1, 4, 16], "result": [1, 4, 16]}
        expected = [(shape, 0.3 if name == "attention" else 0.2, is_training) for name, shape in each.items()]
        assert dropped == expected
        dropped.clear()
