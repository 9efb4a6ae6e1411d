"""Training the embedded pair: what a step depends on, what a kill costs, what the losses are, what is shipped."""

import json
import re
import subprocess
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, GPT2LMHeadModel

from specdec_lite.training import __main__ as command
from specdec_lite.training import corpus, distill, gutenberg, loop, pretrain, report

KING = "Once there was a king who had {} sons, and the youngest of them rode into the wood to look for the blue bird."
STORIES = [KING.format(number) + "\nAnd so it came about." for number in range(60)]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer():
    return corpus.train_tokenizer(STORIES, 300)


@pytest.fixture(scope="module")
def streams(tokenizer):
    return [corpus.token_stream(tokenizer, stories) for stories in corpus.split(STORIES)]


@pytest.fixture
def corpus_file(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("".join(f"{corpus.END_OF_TEXT}\n{story}\n" for story in STORIES), encoding="utf-8")
    return path


def tiny(tokenizer, *, width=32, layers=1, heads=2, positions=24, seed=0):
    return pretrain.new_model(tokenizer, layers=layers, width=width, heads=heads, positions=positions, seed=seed)


def same_weights(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


# The corpus


def test_every_30th_story_is_for_validation():
    training, validation = corpus.split([str(number) for number in range(1, 91)])
    assert validation == ["30", "60", "90"]
    assert len(training) == 87
    assert not set(training) & set(validation)


def test_a_missing_or_too_small_corpus_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.txt"):
        corpus.read_stories(tmp_path / "none.txt")
    small = tmp_path / "small.txt"
    small.write_text(f"{corpus.END_OF_TEXT}\nOne story.\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"small\.txt holds 1 stories"):
        corpus.read_stories(small)


@pytest.mark.parametrize(
    "text", [bytes(range(256)).decode("latin-1"), "  two  spaces \n\t. , !", "naïve 魔法 🧚🏽 \u200b", ""]
)
def test_decoding_gives_any_text_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_end_of_text_token_begins_each_story(tokenizer):
    stream = corpus.token_stream(tokenizer, ["A king.", "A queen."])
    end = tokenizer.eos_token_id
    assert stream.tolist() == [end, *tokenizer.encode("A king."), end, *tokenizer.encode("A queen.")]


def test_a_batch_is_a_function_of_seed_and_step():
    def batch(seed, step):
        return corpus.random_windows(torch.arange(10_000), rows=4, length=16, seed=seed, step=step)

    torch.manual_seed(1)
    first = batch(0, 7)
    torch.manual_seed(2)
    assert torch.equal(first, batch(0, 7))
    assert not torch.equal(first, batch(0, 8))
    assert not torch.equal(first, batch(1, 7))
    assert torch.equal(first, first[:, :1] + torch.arange(16))  # each row is a window of consecutive tokens


# Killed and resumed


def run_of(kind, tokenizer, streams, out, steps=24):
    """One small run of either kind, with a checkpoint every 5 steps; its model."""
    if kind == "pretrain":
        model = tiny(tokenizer, layers=2)
        pretrain.pretrain(model, *streams, out=out, steps=steps, rows=2)
    else:
        model = tiny(tokenizer, width=16)
        distill.distill(model, tiny(tokenizer, seed=1), *streams, out=out, steps=steps, rows=2, variation_share=0.5)
    return model


@pytest.mark.parametrize(("kind", "module"), [("pretrain", pretrain), ("distill", distill)])
@pytest.mark.parametrize("killed_at", [3, 13, 20])
def test_a_killed_run_ends_like_one_that_was_not(kind, module, killed_at, tokenizer, streams, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "train", partial(loop.train, checkpoint_every=5))
    whole = run_of(kind, tokenizer, streams, tmp_path / "whole")

    def kill(stream, **place):
        if place["step"] == killed_at:
            raise KeyboardInterrupt
        return corpus.random_windows(stream, **place)

    with monkeypatch.context() as patch:
        patch.setattr(module, "random_windows", kill)
        with pytest.raises(KeyboardInterrupt):
            run_of(kind, tokenizer, streams, tmp_path / "killed")
    resumed = run_of(kind, tokenizer, streams, tmp_path / "killed")

    assert same_weights(resumed, whole)
    logs = [
        [json.loads(line) for line in (tmp_path / run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
        for run in ("whole", "killed")
    ]
    losses = [{row["step"]: row["loss"] for row in log} for log in logs]
    assert losses[0] == losses[1]  # no step is missing, and those that were done twice came out the same
    assert list(losses[0]) == [10, 20, 24]


KILLED_RUN = """
import os, signal, sys
from pathlib import Path
import torch
from specdec_lite.training.loop import train

torch.set_num_threads(1)
torch.manual_seed(0)
linear = torch.nn.Linear(4, 4)
model = torch.nn.ModuleDict({"transformer": torch.nn.ModuleDict({"h": linear})})

def loss_at(step):
    if step == int(sys.argv[2]):
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return (linear(inputs) - inputs.flip(1)).square().mean()

train(model, loss_at, steps=12, lr=0.1, out=Path(sys.argv[1]), checkpoint_every=4)
"""


def test_a_run_killed_from_outside_resumes(tmp_path):
    def run(name, killed_at):
        arguments = [sys.executable, "-c", KILLED_RUN, str(tmp_path / name), str(killed_at)]
        return subprocess.run(arguments, cwd=Path(__file__).parents[1], capture_output=True, timeout=300).returncode

    assert run("whole", -1) == 0
    assert run("killed", 10) != 0
    assert torch.load(tmp_path / "killed" / "checkpoint.pt", weights_only=True)["step"] == 8
    assert run("killed", -1) == 0
    whole, resumed = (torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("whole", "killed"))
    assert resumed["step"] == whole["step"] == 12
    assert all(torch.equal(whole["model"][name], resumed["model"][name]) for name in whole["model"])


# The losses of distillation


def test_the_losses_are_those_computed_by_hand():
    p = torch.tensor([[[0.5, 0.5], [1.0, 0.0]]])
    logits = torch.tensor([[[0.9, 0.1], [0.5, 0.5]]]).log()
    # KL: 0.5 ln(5/9) + 0.5 ln 5 = ln(5/3) = 0.5108 and ln 2; TV: 0.4 and 0.5.
    assert distill.forward_kl(logits, p).item() == pytest.approx((0.510826 + 0.693147) / 2, abs=1e-5)
    assert distill.variation(logits, p).item() == pytest.approx(0.45, abs=1e-6)


def test_kl_pulls_q_up_where_it_is_near_0_and_variation_does_not():
    p = torch.tensor([[[0.9, 0.1]]])
    gradients = []
    for loss in (distill.forward_kl, distill.variation):
        logits = torch.tensor([[[1e-6, 1 - 1e-6]]]).log().requires_grad_()
        loss(logits, p).backward()
        gradients.append(logits.grad[0, 0, 0].item())
    assert gradients[0] == pytest.approx(1e-6 - 0.9, abs=1e-4)  # q - p
    assert abs(gradients[1]) < 1e-5


def test_a_model_agrees_wholly_with_itself_and_less_with_another(tokenizer, streams):
    windows = corpus.consecutive_windows(streams[1], length=24)
    target, other = tiny(tokenizer), tiny(tokenizer, seed=1)
    assert distill.agreement(target, target, windows) == pytest.approx({"alpha": 1, "greedy_alpha": 1}, abs=1e-6)
    assert distill.agreement(other, target, windows)["alpha"] < 0.99


def test_agreement_is_the_mean_overlap_over_all_positions(tokenizer, streams):
    windows = corpus.consecutive_windows(streams[0], length=24)[:6]  # one and a half batches
    target, draft = tiny(tokenizer), tiny(tokenizer, seed=1)
    with torch.inference_mode():
        p, q = (model(windows).logits.softmax(-1) for model in (target, draft))
    expected = {
        "alpha": torch.minimum(p, q).sum(-1).mean().item(),
        "greedy_alpha": (p.argmax(-1) == q.argmax(-1)).float().mean().item(),
    }
    assert distill.agreement(draft, target, windows) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("variation_share", [0.0, 0.3, 1.0])
def test_distilling_raises_alpha(variation_share, tokenizer, streams, tmp_path):
    target = tiny(tokenizer)
    pretrain.pretrain(target, *streams, out=tmp_path / "target", steps=40, rows=4)
    draft = tiny(tokenizer, width=16)
    distill.init_from_target(draft, target)
    windows = corpus.consecutive_windows(streams[1], length=24)
    before, target_before = distill.agreement(draft, target, windows), target.state_dict()["lm_head.weight"].clone()
    distill.distill(draft, target, *streams, out=tmp_path / "draft", steps=60, rows=4, variation_share=variation_share)
    assert distill.agreement(draft, target, windows)["alpha"] > before["alpha"] + 0.1
    assert torch.equal(target.state_dict()["lm_head.weight"], target_before)


def test_variation_is_the_loss_of_the_last_steps(tokenizer, streams, tmp_path, monkeypatch):
    used = []
    for name in ("forward_kl", "variation"):
        loss = getattr(distill, name)
        monkeypatch.setattr(distill, name, lambda *args, name=name, loss=loss: used.append(name) or loss(*args))
    distill.distill(tiny(tokenizer, width=16), tiny(tokenizer), *streams, out=tmp_path, steps=10, rows=1)
    assert used == ["forward_kl"] * 7 + ["variation"] * 3


def test_tokens_alike_in_the_target_start_alike_in_the_draft(tokenizer):
    target, draft, again = tiny(tokenizer), tiny(tokenizer, width=16, seed=1), tiny(tokenizer, width=16, seed=2)
    with torch.no_grad():
        target.transformer.wte.weight[7] = target.transformer.wte.weight[5]
    for model in (draft, again):
        distill.init_from_target(model, target)
    embedding = draft.transformer.wte.weight
    assert embedding.shape == (len(tokenizer), 16)
    assert torch.equal(embedding, draft.lm_head.weight)
    assert torch.equal(embedding, again.transformer.wte.weight)  # a function of the target alone
    assert torch.allclose(embedding[5], embedding[7], atol=1e-6)
    assert embedding.std().item() == pytest.approx(draft.config.initializer_range, rel=1e-4)


def test_a_draft_of_another_shape_cannot_start_from_the_target(tokenizer):
    with pytest.raises(ValueError, match="same vocabulary"):
        distill.init_from_target(tiny(tokenizer, width=32), tiny(tokenizer, width=16))


# The target's own text


def test_sampled_text_is_windows_that_begin_stories(tokenizer):
    target = tiny(tokenizer)
    torch.manual_seed(0)
    rows = distill.sample_windows(target, rows=3, length=24, seed=5)
    undisturbed = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(1), undisturbed)  # the global generator was left alone
    assert rows.shape == (3, 24)
    assert (rows[:, 0] == tokenizer.eos_token_id).all()
    assert torch.equal(rows, distill.sample_windows(target, rows=3, length=24, seed=5))
    assert not torch.equal(rows, distill.sample_windows(target, rows=3, length=24, seed=6))


def test_sampling_goes_on_after_the_last_whole_batch(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(distill, "SAMPLE_ROWS", 2)
    target = tiny(tokenizer)
    whole = distill.sample_corpus(target, 100, 0, tmp_path / "whole")
    assert len(whole) == 3 * 48  # whole batches, at least 100 tokens
    assert not torch.equal(whole[:48], whole[48:96])
    killed = tmp_path / "killed"
    killed.write_bytes((tmp_path / "whole").read_bytes()[: 48 * 4 + 30])  # in the middle of the second batch
    assert torch.equal(distill.sample_corpus(target, 100, 0, killed), whole)
    assert len(distill.sample_corpus(target, 0, 0, tmp_path / "none")) == 0


# The stages of the command


TINY = ["--layers", "1", "--width", "16", "--heads", "2"]


def stage(name, *arguments):
    command.main([name, *map(str, arguments)])


def error_of(capsys, name, *arguments):
    with pytest.raises(SystemExit) as exit_:
        stage(name, *arguments)
    assert exit_.value.code == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ")
    return message


def test_from_corpus_to_package(corpus_file, tmp_path, monkeypatch, capsys):
    runs, shipped = tmp_path / "runs", tmp_path / "package" / "tiny"
    monkeypatch.setattr(command, "SHIPPED", shipped)
    monkeypatch.setattr(report, "OWN_TEXT_ROWS", 2)
    monkeypatch.setattr(report, "SAMPLE_TOKENS", 20)
    monkeypatch.setattr(distill, "SAMPLE_ROWS", 2)
    reading = ["--corpus", corpus_file, "--out", runs]
    stage("tokenizer", *reading, "--vocab", 300)
    stage("pretrain", *reading, *TINY, "--positions", 24, "--steps", 3)
    stage("distill", *reading, *TINY, "--steps", 3, "--sampled", 48)
    stage("ship", "--out", runs)

    files = sorted(path.relative_to(shipped).as_posix() for path in shipped.rglob("*") if path.is_file())
    models = [f"{name}/{file}" for name in ("draft", "target") for file in ("config.json", "model.safetensors")]
    assert files == [*models, "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"]
    for path in shipped.rglob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert str(tmp_path) not in text
        assert "_name_or_path" not in text
    for name in ("target", "draft"):
        assert {tensor.dtype for tensor in load_file(shipped / name / "model.safetensors").values()} == {torch.float16}
        model = GPT2LMHeadModel.from_pretrained(shipped / name)
        trained = GPT2LMHeadModel.from_pretrained(runs / name / "model")
        assert same_weights(model, trained.half())
    tokenizer = AutoTokenizer.from_pretrained(shipped / "tokenizer")
    assert tokenizer.decode(tokenizer.encode(" naïve 🧚\n")) == " naïve 🧚\n"
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.eos_token_id == model.config.eos_token_id

    card = tmp_path / "card.md"
    card.write_text("before\n<!-- report -->\nold\n<!-- end of report -->\nafter\n", encoding="utf-8")
    capsys.readouterr()
    stage("report", *reading, "--shipped", "--card", card)
    printed = capsys.readouterr().out
    figures = json.loads((runs / "report.json").read_text(encoding="utf-8"))
    assert figures["agreement"]["validation stories"]["tokens"] > 24
    assert f"{figures['validation_loss']['target']:.3f}" in printed
    assert card.read_bytes().decode("utf-8") == f"before\n<!-- report -->\n{printed}<!-- end of report -->\nafter\n"


def test_a_stage_says_what_it_lacks(corpus_file, tmp_path, capsys):
    runs = tmp_path / "runs"
    reading = ["--corpus", corpus_file, "--out", runs]
    assert "no corpus at" in error_of(capsys, "tokenizer", "--corpus", tmp_path / "none.txt", "--out", runs)
    assert "stage `tokenizer`" in error_of(capsys, "pretrain", *reading)
    stage("tokenizer", *reading, "--vocab", 300)
    assert "stage `pretrain`" in error_of(capsys, "distill", *reading)
    assert "stage `pretrain`" in error_of(capsys, "report", *reading)
    assert "stage `pretrain`" in error_of(capsys, "ship", "--out", runs)
    assert "divisible" in error_of(capsys, "pretrain", *reading, "--width", 30)


def test_a_damaged_or_mismatching_checkpoint_is_named(corpus_file, tmp_path, capsys):
    runs = tmp_path / "runs"
    reading = ["--corpus", corpus_file, "--out", runs]
    run = [*reading, *TINY, "--positions", 24, "--steps", 2]
    stage("tokenizer", *reading, "--vocab", 300)
    stage("pretrain", *run)
    checkpoint, weights = runs / "target" / "checkpoint.pt", runs / "target" / "model" / "model.safetensors"

    assert "n_embd 16, not 32" in error_of(capsys, "pretrain", *run, "--width", 32)
    assert f"{checkpoint} was begun with n_head 2, not 4" in error_of(capsys, "pretrain", *run, "--heads", 4)
    stage("pretrain", *run)  # the right sizes still go on

    for size in (0, 10, checkpoint.stat().st_size // 2, checkpoint.stat().st_size - 10):
        checkpoint.write_bytes(checkpoint.read_bytes()[:size])
        assert f"{checkpoint} is damaged or cut short" in error_of(capsys, "pretrain", *run)
    weights.write_bytes(weights.read_bytes()[:-100])
    assert f"{weights.parent} is damaged" in error_of(capsys, "distill", *reading, *TINY)


# Rebuilding the corpus


def book(title, *blocks):
    head = f"The Project Gutenberg eBook\n\n*** START OF THE PROJECT GUTENBERG EBOOK {title} ***\n\n"
    return head + "\n\n".join(blocks) + f"\n\n*** END OF THE PROJECT GUTENBERG EBOOK {title} ***\n\nThe licence.\n"


LINES = "“Once upon a time, long before you were born,” said the fée, “there\nwas a king—and he had _three_ sons.”"
CLEAN = '"Once upon a time, long before you were born," said the fee, "there was a king--and he had three sons."'
SECOND = "And the youngest of them rode into the wood to look for the blue bird that sang at night."
BOOKS = {
    1: book(
        "FIRST", "Produced by volunteers with names so long that this is a paragraph.", "FIRST TALES",
        "CONTENTS", "  THE KING\n  THE WOOD, AND WHAT WAS FOUND IN IT\n  NOTES AND SOURCES AND ACKNOWLEDGEMENTS",
        "THE KING", LINES, "[Illustration: The king and his three sons,\nwho had never been at sea, on the shore]",
        "CHAPTER II.\nThe Wood that Sang", SECOND, "Too short to keep.", SECOND,
    ),
    2: book("SECOND", SECOND, "\"NO!\"", SECOND).replace("\n", "\r\n"),
}  # fmt: skip
LIBRARY = [corpus.END_OF_TEXT, CLEAN, corpus.END_OF_TEXT, SECOND, SECOND, corpus.END_OF_TEXT, SECOND, SECOND]


@pytest.fixture
def library():
    """A server on this machine: ``books`` are what it has, ``asked`` the numbers that it was asked for."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            number = int(re.fullmatch(r"/cache/epub/(\d+)/pg\1\.txt", self.path)[1])
            server.asked.append(number)
            assert "specdec-lite" in self.headers["User-Agent"]
            answer = server.books.get(number)
            status = 404 if answer is None else answer if isinstance(answer, int) else 200
            body = answer.encode("utf-8") if isinstance(answer, str) else b""
            self.send_response(status)
            self.send_header("Content-Length", str(len(body) + server.missing_bytes))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.books, server.asked, server.missing_bytes = dict(BOOKS), [], 0
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_list_is_35_books():
    assert len(gutenberg.BOOKS) == 35


def test_books_become_a_corpus(library, tmp_path):
    out = tmp_path / "corpus.txt"
    gutenberg.build(out, books=[1, 2], mirror=library.url, pause=0)
    assert out.read_text(encoding="utf-8").splitlines() == LIBRARY
    assert out.read_bytes().isascii()
    assert library.asked == [1, 2]


def test_a_missing_book_is_named_and_a_second_call_asks_for_it_alone(library, tmp_path):
    out = tmp_path / "corpus.txt"
    del library.books[1]
    with pytest.raises(OSError, match=rf"book 1 from {library.url}/cache/epub/1/pg1\.txt: HTTP Error 404"):
        gutenberg.build(out, books=[1, 2], mirror=library.url, pause=0)
    assert not out.exists()
    assert library.asked == [1, 2]  # a plain no is not asked again, and the next book is still fetched
    library.books[1] = BOOKS[1]
    gutenberg.build(out, books=[1, 2], mirror=library.url, pause=0)
    assert library.asked == [1, 2, 1]
    assert out.read_text(encoding="utf-8").splitlines() == LIBRARY


@pytest.mark.parametrize("fault", ["busy", "cut short", "not a book"])
def test_a_faulty_answer_leaves_no_book_behind(fault, library, tmp_path):
    library.missing_bytes = 100 if fault == "cut short" else 0
    library.books[1] = {"busy": 503, "cut short": BOOKS[1], "not a book": "<html>"}[fault]
    with pytest.raises(OSError, match="book 1 from"):
        gutenberg.build(tmp_path / "corpus.txt", books=[1], mirror=library.url, pause=0)
    assert library.asked == [1] * (1 if fault == "not a book" else gutenberg.TRIES)
    assert not list((tmp_path / "gutenberg").iterdir())


def test_without_a_connection_the_first_book_ends_it(library, tmp_path, capsys):
    library.shutdown()
    library.server_close()
    with pytest.raises(OSError, match="book 1 from") as error:
        gutenberg.build(tmp_path / "corpus.txt", books=[1, 2], mirror=library.url, pause=0)
    assert "book 2" not in str(error.value)
