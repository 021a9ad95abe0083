"""`kitty-compile export` and `run` on a tiny random Llama with a byte tokenizer."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import kitty_compile
from kitty_compile import export_formats
from tests.test_cli import LONG, assert_one_line_error, invoke, invoke_json, save_model


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def written(model_folder, tmp_path_factory):
    """(the file, what the command said on its standard output and error)"""
    path = tmp_path_factory.mktemp("out") / "model.pt2"
    result = invoke("export", model_folder, "--out", path, "--max-length", 512, "--max-batch", 2, "--dtype", "float32")
    assert result.exit_code == 0, result.output
    return path, result.stdout, result.stderr


def test_export_tells_its_stages_and_writes_a_manifest_beside_the_file(written, model_folder):
    path, out, err = written
    assert err.splitlines() == [
        "loading the model",
        "tracing the model",
        "binding attention to buffers",
        "comparing with the model",
        "writing the file",
    ]
    assert str(path) in out
    manifest = json.loads((path.parent / "model.pt2.json").read_text())
    assert manifest["file_format"] == "pt2"
    assert manifest["file_bytes"] == path.stat().st_size
    assert (manifest["max_batch"], manifest["max_length"]) == (2, 512)
    assert manifest["source"] == model_folder
    assert manifest["config"]["key_bits"] == 2
    assert manifest["state_bytes"] > 0
    assert manifest["layout_version"] > 0


def test_run_gives_the_tokens_of_the_applied_model(written, model_folder):
    ids = list(range(40, 80))
    found = invoke_json("run", written[0], "--prompt-ids", ",".join(map(str, ids)), "--max-new-tokens", 150)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    expected = kitty_compile.apply(model).generate(torch.tensor([ids]), max_new_tokens=150, do_sample=False)
    assert found["tokens"] == expected[0, 40:].tolist()
    assert found["text"] is None
    plain = invoke("run", written[0], "--prompt-ids", "40, 41", "--max-new-tokens", 3)
    assert len(plain.stdout.strip().split(",")) == 3


def test_run_answers_a_prompt_as_generate_does(written, model_folder):
    for raw in ((), ("--raw",)):
        arguments = ("--prompt", LONG, "--max-new-tokens", 12, *raw)
        expected = invoke_json("generate", model_folder, *arguments, "--dtype", "float32", "--no-compare")
        found = invoke_json("run", written[0], *arguments, "--tokenizer", model_folder)
        assert found["text"] == expected["text"]
        assert invoke_json("run", written[0], *arguments)["text"] == expected["text"]


def test_export_prints_json(model_folder, tmp_path):
    out = tmp_path / "model.pt2"
    found = invoke_json(
        "export", model_folder, "--out", out, "--format", "pt2", "--preset", "kitty-pro", "--max-length", 64
    )
    assert found["file"] == str(out)
    assert found["config"]["boost_fraction"] == 0.25


def test_bad_input_is_one_line(written, model_folder, tmp_path):
    path, *_ = written
    for arguments, part in (
        (("export", model_folder, "--out", tmp_path / "x.pt2", "--format", "cat"), "format must be one of pt2"),
        (("export", model_folder, "--out", tmp_path / "absent" / "x.pt2"), "a folder that exists"),
        (("export", str(tmp_path), "--out", tmp_path / "x.pt2"), "config.json"),
        (("run", tmp_path / "absent.pt2", "--prompt-ids", "1"), "FILE must be a file that exists"),
        (("run", path), "exactly one of --prompt and --prompt-ids"),
        (("run", path, "--prompt-ids", "1,b"), "--prompt-ids must be token ids"),
        (("run", path, "--prompt-ids", "1", "--max-new-tokens", 600), "must fit max_length=512"),
        (("run", path, "--prompt-ids", "100000"), "--prompt-ids must be below"),
        (("run", path, "--prompt", ""), "at least one token"),
    ):
        extra = ("--raw",) if "--prompt" in arguments else ()
        assert_one_line_error_of_the_last_line(invoke(*arguments, *extra), part)
    cut = tmp_path / "cut.pt2"
    cut.write_bytes(path.read_bytes()[:5000])
    assert_one_line_error(invoke("run", cut, "--prompt-ids", "1"), "FILE must be a whole file")


def assert_one_line_error_of_the_last_line(result, part):
    """Stages may have been told before."""
    assert result.exit_code == 2, result.output
    assert part in result.stderr.strip().splitlines()[-1]
    assert "Traceback" not in result.output


def test_a_format_is_an_entry_in_a_table(tmp_path, monkeypatch):
    class Echo:
        manifest = {"eos_token_ids": [], "source": ""}  # noqa: RUF012

        def generate(self, input_ids, max_new_tokens, *, eos_token_id=None):
            return torch.cat([input_ids, input_ids[:, :max_new_tokens]], dim=1)

    echo = export_formats.Format(
        export=lambda model, path, options: {}, recognises=lambda path: path.suffix == ".echo", load=lambda path: Echo()
    )
    monkeypatch.setitem(export_formats.FORMATS, "echo", echo)
    path = tmp_path / "some.echo"
    path.write_text("echo")
    assert invoke_json("run", path, "--prompt-ids", "7,8,9", "--max-new-tokens", 2)["tokens"] == [7, 8]
