"""The kitty-compile command on a tiny random Llama with a byte tokenizer."""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import kitty_compile
from kitty_compile import cli, loading

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LONG = "a text that goes on and on. " * 12
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 2, 2, 16


def save_model(folder, *, hidden_size=64, chat_template=TEMPLATE):
    torch.manual_seed(0)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(["</s>", *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>")
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(letters) + 1,
        hidden_size=hidden_size,
        intermediate_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=NUM_KV_HEADS,
        max_position_embeddings=1024,
        initializer_range=0.2,
        eos_token_id=None,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("model")))


def invoke(*arguments, text=None):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], input=text)


def invoke_json(*arguments, text=None):
    result = invoke(*arguments, "--json", text=text)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def assert_one_line_error(result, part):
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1
    assert part in result.stderr


def test_generate_streams_the_answer_and_shows_the_table(model_folder):
    result = invoke("generate", model_folder, "--prompt", LONG, "--max-new-tokens", 8, "--dtype", "float32")
    assert result.exit_code == 0, result.output
    for part in ("packed pages", "raw tokens", "bits per K or V element", "prefill, tokens/s", "decode, tokens/s"):
        assert part in result.stdout


def test_generate_json_counts_every_byte(model_folder):
    found = invoke_json(
        "generate", model_folder, "--prompt", LONG, "--raw", "--max-new-tokens", 8, "--dtype", "float32"
    )
    memory = found["memory"]
    tokens = len(LONG) + 8 - 1  # the last new token is never fed back
    assert found["prompt_tokens"] == len(LONG)
    assert found["new_tokens"] == 8
    assert memory["tokens"] == tokens
    assert memory["sixteen_bit_bytes"] == 2 * 2 * NUM_LAYERS * NUM_KV_HEADS * HEAD_DIM * tokens
    assert memory["own_cache_bytes"] == 2 * memory["sixteen_bit_bytes"]
    assert memory["packed_bytes"] > 0
    assert memory["bytes_in_use"] == memory["packed_bytes"] + memory["raw_bytes"]
    assert memory["allocated_bytes"] == memory["bytes_in_use"] + memory["free_bytes"]
    assert memory["bits_per_element"] == pytest.approx(16 * memory["bytes_in_use"] / memory["sixteen_bit_bytes"])
    for run in ("kitty", "own_cache"):
        assert found["speed"][run]["decoded_tokens"] == 7
        assert found["speed"][run]["prompt_tokens"] == len(LONG)
        assert found["speed"][run]["decode_tokens_per_second"] > 0


def test_lossless_answers_like_the_model_itself(model_folder):
    arguments = ("--prompt", LONG, "--raw", "--max-new-tokens", 12, "--dtype", "float32", "--no-compare")
    found = invoke_json("generate", model_folder, *arguments, "--preset", "lossless")
    model = loading.load_model(model_folder, dtype="float32")
    tokenizer = loading.load_tokenizer(model_folder)
    inputs = tokenizer(LONG, return_tensors="pt")
    expected = model.generate(inputs["input_ids"], max_new_tokens=12, do_sample=False)[0, len(LONG) :]
    assert found["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert found["memory"]["own_cache_bytes"] is None
    assert found["speed"]["own_cache"] is None


def test_prompt_goes_through_the_chat_template_unless_raw(model_folder):
    arguments = ("--max-new-tokens", 1, "--no-compare")
    assert invoke_json("generate", model_folder, "--prompt", "abc", *arguments)["prompt_tokens"] == len(
        "<user>abc</><assistant>"
    )
    assert invoke_json("generate", model_folder, "--prompt", "abc", "--raw", *arguments)["prompt_tokens"] == 3


def test_prompt_file_and_standard_input(model_folder, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("abcd", encoding="utf-8")
    arguments = ("--raw", "--max-new-tokens", 2, "--no-compare")
    from_file = invoke_json("generate", model_folder, "--prompt-file", path, *arguments)
    from_stdin = invoke_json("generate", model_folder, "--prompt-file", "-", *arguments, text="abcd")
    assert from_file["prompt_tokens"] == from_stdin["prompt_tokens"] == 4
    assert from_file["text"] == from_stdin["text"]


def test_sampling_follows_the_seed(model_folder):
    arguments = ("--prompt", "abc", "--raw", "--max-new-tokens", 24, "--no-compare", "--temperature", 1.5)
    texts = [invoke_json("generate", model_folder, *arguments, "--seed", seed)["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_chat_keeps_one_cache_over_its_turns(model_folder):
    result = invoke("generate", model_folder, "--chat", "--max-new-tokens", 5, text=f"{LONG}\nand more\n\n")
    assert result.exit_code == 0, result.output
    text = f"<user>{LONG.strip()}</><assistant>" + 5 * "x" + "</><user>and more</><assistant>" + 5 * "x"
    # Random answers may hold bytes that are no text: then the template writes them anew and the chat starts over.
    assert "KV cache of" in result.stdout
    assert f"KV cache of {len(text) - 1} tokens" in result.stdout or "\ufffd" in result.stdout


def test_chat_ends_at_the_model_s_last_position(model_folder):
    result = invoke("generate", model_folder, "--chat", "--max-new-tokens", 5, text=f"abc\n{'x' * 1024}\nmore\n")
    assert result.exit_code == 0
    assert "1024 positions" in result.stderr
    assert "KV cache of" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((), "exactly one of"),
        (("--prompt", "a", "--chat"), "exactly one of"),
        (("--chat", "--json"), "--json must not"),
        (("--chat", "--raw"), "chat template"),
        (("--prompt-file", "/nowhere/prompt.txt"), "No such file"),
        (("--prompt", "", "--raw"), "at least one token"),
        (("--prompt", "a" * 2000), "1024 positions"),
        (("--prompt", "a", "--preset", "dog"), "preset must be one of"),
        (("--prompt", "a", "--dtype", "int8"), "dtype must be one of"),
        (("--prompt", "a", "--device", "toaster"), "device must be one"),
    ],
)
def test_generate_refuses_bad_input_in_one_line(model_folder, arguments, part):
    assert_one_line_error(invoke("generate", model_folder, *arguments), part)


@pytest.mark.parametrize("command", ["generate", "report"])
def test_bad_models_are_refused_in_one_line(command, tmp_path):
    arguments = ("--prompt", "a") if command == "generate" else ()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "no such thing"}')
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.gguf").write_bytes(b"GGUF nothing more")
    for name, part in {
        "/nowhere/at/all": "MODEL must be",
        "nowhere.gguf": "file that exists",
        str(tmp_path / "empty"): "config.json",
        str(tmp_path / "broken"): "cannot be loaded",
        "nobody/no-such-model": "cannot be loaded",
    }.items():
        assert_one_line_error(invoke(command, name, *arguments), part)
    assert_one_line_error(invoke(command, tmp_path / "broken.gguf", *arguments), ".gguf")


def test_generate_refuses_a_model_that_cannot_be_served(tmp_path):
    save_model(tmp_path, hidden_size=32)
    assert_one_line_error(invoke("generate", tmp_path, "--prompt", "a"), "head_dim must be a multiple of 16")


@pytest.mark.parametrize("extra", [(), ("--random-weights",)])
def test_report_has_a_row_for_every_layer(model_folder, extra):
    table = invoke("report", model_folder, *extra)
    assert table.exit_code == 0, table.output
    assert table.stdout.count("quantized") == NUM_LAYERS + 1
    found = invoke_json("report", model_folder, *extra, "--preset", "kitty-pro")
    assert found["preset"] == "kitty-pro"
    assert [layer["status"] for layer in found["layers"]] == ["quantized"] * NUM_LAYERS
    assert [layer["num_boosted"] for layer in found["layers"]] == [4] * NUM_LAYERS


def test_report_shows_why_a_model_is_refused(tmp_path):
    save_model(tmp_path, hidden_size=32)
    found = invoke_json("report", tmp_path)
    assert {layer["status"] for layer in found["layers"]} == {"refused"}
    assert all("multiple of 16" in layer["reason"] for layer in found["layers"])


def test_the_model_is_left_alone_by_report(model_folder):
    model = loading.load_model(model_folder)
    before = vars(model).keys() - {"_is_hf_initialized"}
    kitty_compile.report(model)
    assert vars(model).keys() - {"_is_hf_initialized"} == before


def test_help_names_both_commands():
    result = invoke("--help")
    assert result.exit_code == 0
    assert "generate" in result.stdout
    assert "report" in result.stdout
