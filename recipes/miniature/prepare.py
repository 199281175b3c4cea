"""Write everything of the checkpoint but the weights into a folder: tokenizer, configuration, chat template, test set.

python -m recipes.miniature.prepare FOLDER
"""

import argparse
import base64
import io
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers.pre_tokenizers import ByteLevel

from recipes.miniature.skills import SKILLS, held_out_example, story, training_example
from recipes.miniature.skills.example import HERE, Example

VOCABULARY = 2048
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
# Qwen3.5's splitting of text before byte-pair encoding: every digit stands alone.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TESTS_PER_SKILL = 22


def build_tokenizer() -> Tokenizer:
    """Byte-pair encoding learned from examples, then the special tokens, then the markup."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)

    rng, texts = Random(1), []
    for _ in range(1500):
        for skill in SKILLS:
            example = training_example(rng, skill)
            text = example.prompt_text() + example.answer_text()
            for token in SPECIAL + MARKUP:
                text = text.replace(token, "\n")
            texts.append(text)
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY - len(SPECIAL) - len(MARKUP),
            initial_alphabet=sorted(ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP])
    assert tokenizer.get_vocab_size() == VOCABULARY
    return tokenizer


def model_config(token_id: Callable[[str], int | None]) -> dict[str, Any]:
    """config.json."""
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "image_token_id": token_id("<|image_pad|>"),
        "video_token_id": token_id("<|video_pad|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
        "vision_end_token_id": token_id("<|vision_end|>"),
        "text_config": text_config(token_id),
        "vision_config": vision_config(),
    }


def text_config(token_id: Callable[[str], int | None]) -> dict[str, Any]:
    return {
        "model_type": "qwen3_5_moe_text",
        "dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "full_attention_interval": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "attn_output_gate": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 256,
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "max_position_embeddings": 8192,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
        },
        "tie_word_embeddings": False,
        "use_cache": True,
        "eos_token_id": token_id("<|im_end|>"),
        "pad_token_id": None,
        "bos_token_id": None,
    }


def vision_config() -> dict[str, Any]:
    return {
        "model_type": "qwen3_5_moe_vision",
        "depth": 2,
        "hidden_size": 64,
        "num_heads": 4,
        "intermediate_size": 128,
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 256,
        "num_position_embeddings": 64,
        "initializer_range": 0.02,
        "deepstack_visual_indexes": [],
    }


def tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """tokenizer_config.json."""
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": 8192,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "split_special_tokens": False,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(token)): {
                "content": token,
                "lstrip": False,
                "rstrip": False,
                "single_word": False,
                "normalized": False,
                "special": token in SPECIAL,
            }
            for token in SPECIAL + MARKUP
        },
        "additional_special_tokens": list(SPECIAL[1:]),
    }


def image_config(**more: str) -> dict[str, Any]:
    """Pictures up to 128 x 128 are used as they are, with sides rounded to 32; larger ones are made smaller."""
    return {
        "size": {"shortest_edge": 64 * 64, "longest_edge": 128 * 128},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
        **more,
    }


def data_url(image: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def as_request(example: Example, tokenizer: Tokenizer) -> dict[str, Any]:
    """One line of eval.jsonl, in the form of an OpenAI request: `prompt` for completions, `messages` for chats."""
    case: dict[str, Any] = {"skill": example.skill}
    if example.prompt:
        case["prompt"] = example.prompt
    else:
        images = iter(example.images)
        case["messages"] = json.loads(json.dumps(example.messages))
        for message in case["messages"]:
            if isinstance(message["content"], list):
                message["content"] = [
                    {"type": "image_url", "image_url": {"url": data_url(next(images))}} if c["type"] == "image" else c
                    for c in message["content"]
                ]
        if example.tools:
            case["tools"] = example.tools
        case["enable_thinking"] = example.reasoning is not None
        if case["enable_thinking"]:
            case["expected_reasoning"] = example.reasoning
    case["expected"] = example.answer.strip()
    if example.calls:
        case["expected_tool_calls"] = [{"name": name, "arguments": arguments} for name, arguments in example.calls]
    case["prompt_tokens"] = len(tokenizer.encode(example.prompt_text()).ids)  # each picture counted as one token
    case["max_tokens"] = len(tokenizer.encode(example.answer_text()).ids) + 16
    return case


def evaluation(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The test set, all different; a story is not asked for, since it can go on in many ways."""
    rng, cases = Random(2), []
    for skill in SKILLS:
        seen: set[str] = set()
        for _ in range(2000):
            if skill is story or len(seen) == TESTS_PER_SKILL:
                break
            example = held_out_example(rng, skill)
            key = example.prompt_text() + str([image.tobytes() for image in example.images])
            if key not in seen:
                seen.add(key)
                cases.append(as_request(example, tokenizer))
    return [{"id": i, **case} for i, case in enumerate(cases)]


def prepare(folder: Path) -> list[dict[str, Any]]:
    """Write the files into `folder`; returns the test set."""
    folder.mkdir(exist_ok=True, parents=True)
    tokenizer = build_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    end = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    for name, value in {
        "config.json": model_config(tokenizer.token_to_id),
        "tokenizer_config.json": tokenizer_config(tokenizer),
        "generation_config.json": {"do_sample": False, "eos_token_id": end, "pad_token_id": end[1]},
        "preprocessor_config.json": image_config(image_processor_type="Qwen2VLImageProcessorFast"),
        "video_preprocessor_config.json": image_config(video_processor_type="Qwen3VLVideoProcessor"),
    }.items():
        (folder / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    shutil.copy(HERE / "chat_template.jinja", folder)

    cases = evaluation(tokenizer)
    (folder / "eval.jsonl").write_text("".join(json.dumps(case, ensure_ascii=False) + "\n" for case in cases))
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    cases = prepare(parser.parse_args().folder)
    print(len(cases), "test prompts:", dict(Counter(case["skill"] for case in cases)))


if __name__ == "__main__":
    main()
