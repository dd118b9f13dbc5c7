"""Write small tokenizers in the forms that the folders of published models have.

Their vocabularies are trained here. The names are those of the families that have the form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = [
    f"def function_{n}(x):\n    return x * {n * 7} + {n % 13}  # naïve\n" * (n % 5 + 1)
    for n in range(90)
]
HARD = [
    "Hello  world,\n\n\tit's 12345 tokens", "naïve café 日本語 🙂", " leading and trailing ",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "[INST] x [/INST]</s>",
    "a<|eot_id|>b<s>c<bos>d", "x<|user|> y <|end|>\n z", "one [SEP] two [CLS] three", "",
]  # fmt: skip
CHATML = (
    "{{ bos_token or '' }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "{{ bos_token or '' }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}"
    "{{ eos_token }}{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FAST = "PreTrainedTokenizerFast"


def framed(rust: Any, before: str | None, after: str | None = None) -> None:
    """Put special tokens before and after a text."""
    single = " ".join(part for part in (before, "$A", after) if part)
    named = [token for token in dict.fromkeys((before, after)) if token]
    rust.post_processor = processors.TemplateProcessing(
        single=single,
        pair=f"{single} $B:1",
        special_tokens=[(token, rust.token_to_id(token)) for token in named],
    )


def byte_level(special: Sequence[str], *steps: Any) -> Any:
    """Make a byte-level BPE whose special tokens come after its words."""
    rust = tokenizers.Tokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.Sequence([
        *steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not steps)
    ])  # fmt: skip
    rust.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    rust.train_from_iterator(TEXTS, trainer)
    rust.add_special_tokens([AddedToken(token, special=True) for token in special])
    return rust


def split() -> Any:
    return pre_tokenizers.Split(Regex(WORDS), "isolated")


def metaspace(
    first: Sequence[str], more: Sequence[AddedToken] = (), *, fallback: bool = True
) -> Any:
    """Make a BPE as SentencePiece's, with bytes for what it does not know."""
    rust = tokenizers.Tokenizer(
        models.BPE(unk_token="<unk>", byte_fallback=fallback, fuse_unk=True)
    )
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    rust.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(content=" ", left=1),
    ])  # fmt: skip
    special = ["<unk>", *first, *(f"<0x{n:02X}>" for n in range(256) if fallback)]
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=special, show_progress=False)
    words = [word for text in TEXTS for word in text.split()]
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    rust.train_from_iterator([" ".join(words)], trainer)
    tree = json.loads(rust.to_str())
    tree["added_tokens"] = [t for t in tree["added_tokens"] if not t["content"].startswith("<0x")]
    rust = tokenizers.Tokenizer.from_str(json.dumps(tree))
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    rust.add_tokens(list(more))
    return rust


def unigram(special: Sequence[str]) -> Any:
    rust = tokenizers.Tokenizer(models.Unigram())
    rust.normalizer = normalizers.Sequence([normalizers.NFKC()])
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=[*special, "<unk>"], unk_token="<unk>", show_progress=False
    )
    rust.train_from_iterator(TEXTS, trainer)
    return rust


def gpt2() -> tuple[Any, dict[str, Any]]:
    rust, end = byte_level(["<|endoftext|>"]), "<|endoftext|>"
    return rust, {"tokenizer_class": "GPT2Tokenizer", "bos_token": end, "eos_token": end}


def qwen2() -> tuple[Any, dict[str, Any]]:
    words = pre_tokenizers.Split(Regex(WORDS.replace("{1,3}", "")), "isolated")
    rust = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], words)
    rust.normalizer = normalizers.NFC()
    return rust, {
        "tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "chat_template": CHATML,
    }  # fmt: skip


def llama3() -> tuple[Any, dict[str, Any]]:
    rust = byte_level(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"], split())
    framed(rust, "<|begin_of_text|>")
    return rust, {
        "tokenizer_class": FAST, "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>",
        "chat_template": (
            "{{ bos_token }}{% for m in messages %}{{ m.role }}:\n\n{{ m.content | trim }}"
            "<|eot_id|>{% endfor %}{% if add_generation_prompt %}assistant:\n\n{% endif %}"
        ),
    }  # fmt: skip


def chatml_bos() -> tuple[Any, dict[str, Any]]:
    """A token of turns is a word that the configuration alone makes special."""
    rust = byte_level([], split())
    tree = json.loads(rust.to_str())
    tree["model"]["vocab"]["<|im_end|>"] = len(tree["model"]["vocab"])
    rust = tokenizers.Tokenizer.from_str(json.dumps(tree))
    rust.add_special_tokens(["<|endoftext|>", "<|begin_of_text|>", "<|im_start|>"])
    framed(rust, "<|begin_of_text|>")
    return rust, {
        "tokenizer_class": FAST, "bos_token": "<|begin_of_text|>", "eos_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "chat_template": CHATML,
    }  # fmt: skip


def llama2() -> tuple[Any, dict[str, Any]]:
    rust = metaspace(["<s>", "</s>"])
    framed(rust, "<s>")
    return rust, {
        "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>",
        "unk_token": "<unk>", "legacy": False, "add_bos_token": True, "chat_template": INST,
    }  # fmt: skip


def mistral() -> tuple[Any, dict[str, Any]]:
    rust = metaspace(["<s>", "</s>", "[INST]", "[/INST]"])
    rust.pre_tokenizer = None
    rust.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    framed(rust, "<s>")
    return rust, {
        "tokenizer_class": FAST, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
        "chat_template": INST,
    }  # fmt: skip


def gemma() -> tuple[Any, dict[str, Any]]:
    rust = metaspace(["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"])
    rust.normalizer, rust.pre_tokenizer = normalizers.Replace(" ", "▁"), None
    framed(rust, "<bos>")
    return rust, {"tokenizer_class": FAST, "bos_token": "<bos>", "eos_token": "<eos>"}


def phi3() -> tuple[Any, dict[str, Any]]:
    """No token begins a text, and special tokens take the spaces after them."""
    more = [AddedToken(t, special=True, rstrip=True, normalized=False)
            for t in ("<|user|>", "<|assistant|>", "<|end|>")]  # fmt: skip
    return metaspace(["<s>", "</s>"], more), {
        "tokenizer_class": FAST, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
        "chat_template": (
            "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
        ),
    }  # fmt: skip


def t5() -> tuple[Any, dict[str, Any]]:
    """A token ends each text."""
    rust = unigram(["<pad>", "</s>"])
    framed(rust, None, "</s>")
    return rust, {"tokenizer_class": FAST, "eos_token": "</s>", "pad_token": "<pad>"}


def xlm_roberta() -> tuple[Any, dict[str, Any]]:
    rust = unigram(["<s>", "<pad>", "</s>"])
    framed(rust, "<s>", "</s>")
    return rust, {"tokenizer_class": FAST, "bos_token": "<s>", "eos_token": "</s>"}


def bert() -> tuple[Any, dict[str, Any]]:
    rust = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    rust.normalizer = normalizers.BertNormalizer()
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    rust.train_from_iterator(TEXTS, trainer)
    framed(rust, "[CLS]", "[SEP]")
    return rust, {
        "tokenizer_class": FAST, "cls_token": "[CLS]", "sep_token": "[SEP]", "eos_token": "[SEP]",
        "bos_token": "[CLS]", "unk_token": "[UNK]", "pad_token": "[PAD]",
    }  # fmt: skip


KINDS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    f.__name__: f
    for f in (gpt2, qwen2, llama3, chatml_bos, llama2, mistral, gemma, phi3, t5, xlm_roberta, bert)
}


def write_tokenizer(folder: Path, kind: str) -> Any:
    """Write the files of a tokenizer to a new folder; return the tokenizer of transformers."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    rust, config = KINDS[kind]()
    rust.save(str(folder / "tokenizer.json"))
    if template := config.pop("chat_template", None):
        (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"model_max_length": 512}))
    return transformers.AutoTokenizer.from_pretrained(folder)


def write_model(
    folder: Path,
    kind: str,
    *,
    seed: int = 0,
    scale: float = 3.0,
    family: str = "llama",
    **more: Any,
) -> Any:
    """Write a small Llama of random weights with such a tokenizer; return the tokenizer.

    Another `family` with `more` keys may be asked for.
    """
    import torch
    import transformers

    loaded = write_tokenizer(folder, kind)
    torch.manual_seed(seed)
    shape = transformers.AutoConfig.for_model(
        family, vocab_size=len(loaded), hidden_size=32, intermediate_size=64,
        num_attention_heads=2, max_position_embeddings=256, bos_token_id=loaded.bos_token_id,
        eos_token_id=loaded.eos_token_id, pad_token_id=None, **{"num_hidden_layers": 1, **more},
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(shape)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(scale)  # the most likely token is far from the next one
    model.save_pretrained(folder)
    return loaded
