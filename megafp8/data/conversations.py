"""Make conversations into tokens by the chat template of a model's tokenizer.

transformers renders the template, in its sandbox, so that a conversation has the text and the
tokens that a served model gets. The loss counts the turns of the assistant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megafp8.data.examples import Example, Faults, is_text
from megafp8.data.named_tokenizers import transformers_tokenizer
from megafp8.data.tokenize import Tokenizer, frame_of
from megafp8.errors import DataError
from megafp8.specs.data import CONVERSATIONS, InstructionSpec

ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "model": "assistant", "bot": "assistant", "system": "system",
    "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
"""The roles of messages by the names that ShareGPT's files have for them, in lower case."""

CLOCK = "strftime_now"
"""The function by which transformers gives templates today's date."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""What marks the assistant's words in templates that say which these are."""

Messages = Sequence[Mapping[str, Any]]


class ConversationError(ValueError):
    """Report what is wrong with one conversation: the field, the reason and a hint."""

    def __init__(self, field: str, reason: str, hint: str) -> None:
        super().__init__(field, reason, hint)
        self.field, self.reason, self.hint = field, reason, hint


@dataclass(frozen=True)
class Conversation:
    """Hold the messages of one example, and descriptions of the tools that it may call."""

    messages: Messages
    tools: Sequence[Any] | None = None


@dataclass(frozen=True)
class Chat:
    """Render conversations by the chat template in a folder.

    Attributes:
        folder: The folder with the files of the model's tokenizer.
        tokenizer: The tokenizer that makes tokens of the rendered text.
        ends: The tokens with which the model ends a text.
    """

    folder: Path
    tokenizer: Tokenizer
    ends: frozenset[int]

    @cached_property
    def _theirs(self) -> Any:
        loaded = transformers_tokenizer(str(self.folder))
        if not loaded.chat_template:
            raise DataError(
                self.folder,
                "chat template",
                "is missing, and conversations are rendered by it",
                "Put the model's chat_template.jinja there, or write the texts of conversations "
                "into fields of model.data.train_ds.prompt_template",
            )
        return loaded

    @property
    def marks_answers(self) -> bool:
        """Whether the template itself says which words are the assistant's."""
        template = self._theirs.get_chat_template()
        return _GENERATION.search(template) is not None

    def text(self, talk: Conversation, *, asks: bool = False, has_clock: bool = True) -> str:
        """Return a conversation as text.

        Args:
            talk: The conversation.
            asks: Whether the beginning of the assistant's next turn follows.
            has_clock: Whether the template may read today's date. The examples of a run must be the
                same on every day.

        Raises:
            ConversationError: The template cannot render it.
        """
        rendered: str = self._apply(talk, asks, has_clock, tokenize=False)
        return rendered

    def marked(self, talk: Conversation) -> tuple[list[int], NDArray[np.bool_]]:
        """Return the tokens of a conversation, and which of them are the assistant's.

        Raises:
            ConversationError: The template cannot render it, or a turn is other text once later
                turns follow.
        """
        if self.marks_answers:
            return self._marked_by_template(talk)
        whole, texts, turns = self.text(talk, has_clock=False), list[str](), list[int]()
        for number, message in enumerate(talk.messages):
            if message["role"] == "assistant":
                before = Conversation(talk.messages[:number], talk.tools)
                texts += [self.text(before, asks=True, has_clock=False) if number else ""]
                until = Conversation(talk.messages[: number + 1], talk.tools)
                texts += [self.text(until, has_clock=False)]
                turns.append(number + 1)
        ids, *parts = self.tokenizer.encode_marked([whole, *texts])
        counted = np.zeros(len(ids), np.bool_)
        for turn, before_ids, until_ids in zip(turns, parts[::2], parts[1::2], strict=True):
            for part in (before_ids, until_ids):
                if ids[: len(part)] != part:
                    raise ConversationError(
                        f"turn {turn}",
                        "the chat template writes it otherwise once later turns follow, so that "
                        "the model would learn another text than it is asked with",
                        "Give conversations with one answer, or a chat template that marks answers "
                        "by {% generation %}",
                    )
            counted[len(before_ids) : len(until_ids)] = True
        return ids, counted

    def _marked_by_template(self, talk: Conversation) -> tuple[list[int], NDArray[np.bool_]]:
        found = self._apply(
            talk, False, False, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        (ids,) = self.tokenizer.encode_marked([self.text(talk, has_clock=False)])
        if list(found["input_ids"]) != ids:
            reason = "are others in transformers than in the model's folder here"
            hint = "Import the model again, with this version of transformers installed"
            raise ConversationError("tokens", reason, hint)
        return ids, np.array(found["assistant_masks"], np.bool_)

    def _apply(self, talk: Conversation, asks: bool, has_clock: bool, **how: Any) -> Any:
        messages = [dict(message) for message in talk.messages]
        tools = None if talk.tools is None else list(talk.tools)
        try:
            template = self._theirs.get_chat_template(tools=tools)
            if not has_clock:  # templates take a date of their own where there is no such function
                how["chat_template"] = template.replace(CLOCK, f"{CLOCK}_in_training")
            return self._theirs.apply_chat_template(
                messages, tools=tools, add_generation_prompt=asks, **how
            )
        except DataError:
            raise
        except Exception as error:  # a template may do anything wrong that its language allows
            reason = " ".join(str(error).split()) or type(error).__name__
            hint = "Write the messages as the template wants them, or correct the template"
            name = "the chat template"
            raise ConversationError(name, f"refuses the conversation ({reason})", hint) from error


def is_conversation(example: Example) -> bool:
    """Whether an example has a list of messages."""
    return any(isinstance(example.fields.get(name), list) for name in CONVERSATIONS)


def conversation_of(fields: Mapping[str, object], label_key: str) -> Conversation:
    """Return the conversation that an example's fields hold.

    They are `messages` as transformers has them, `conversations` as ShareGPT and NeMo have them,
    or a question and an answer: Alpaca's `instruction` and `input`, or `input` alone, and
    `label_key`. The text of Alpaca's two fields has a line break between them. `system` is the
    first message in all of them, and `history` has earlier questions with their answers.

    Raises:
        ConversationError: A field is missing or is no list of messages with texts.
    """
    name = next((name for name in CONVERSATIONS if fields.get(name) is not None), None)
    turns = _listed(name, fields[name]) if name else _question(fields, label_key)
    system, tools = fields.get("system"), fields.get("tools")
    if system and not any(turn["role"] == "system" for turn in turns):
        turns = [_message("system", "system", system), *turns]
    if tools is not None and not isinstance(tools, list):
        raise ConversationError("tools", "is no list", "Write the tools as a list of objects")
    if not any(turn["role"] == "assistant" and turn.get("content") != "" for turn in turns):
        hint = "Leave the example out, or write an answer"
        raise ConversationError(name or label_key, "has no answer of the assistant", hint)
    return Conversation(turns, tools or None)


def question_of(fields: Mapping[str, object], system: str | None) -> Conversation:
    """Return the conversation that a model is to continue, after a system prompt if one is given.

    It is `messages` or `conversations` of the fields, or else the text of `prompt`.

    Raises:
        ConversationError: There is neither, or it is no list of messages with texts.
    """
    name = next((name for name in CONVERSATIONS if fields.get(name) is not None), None)
    asked = (
        _listed(name, fields[name]) if name else [_message("prompt", "user", fields.get("prompt"))]
    )
    first = [] if system is None else [_message("--system", "system", system)]
    tools = fields.get("tools")
    return Conversation([*first, *asked], tools if isinstance(tools, list) else None)


def _listed(name: str, value: object) -> list[dict[str, Any]]:
    hint = 'Write [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]'
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise ConversationError(name, "is no list of objects", hint)
    turns = []
    for number, item in enumerate(value, start=1):
        place = f"{name}, turn {number}"
        role, content = item.get("role", item.get("from")), item.get("content", item.get("value"))
        if not isinstance(role, str):
            raise ConversationError(place, "has no role (role or from)", hint)
        role = ROLES.get(role.lower(), role)
        others = {k: v for k, v in item.items() if v is not None and k not in ("from", "value")}
        if content is None and others.get("tool_calls"):
            turns.append({**others, "role": role})
            continue
        turns.append({**others, **_message(place, role, content)})
    return turns


def _message(place: str, role: str, content: object) -> dict[str, Any]:
    if not isinstance(content, str):
        what = "missing" if content is None else f"of type {type(content).__name__}, not a text"
        hint = "Write the text of the turn in quotes; images and sounds are not read"
        raise ConversationError(place, f"its content is {what}", hint)
    if not is_text(content):
        reason = "has half of a surrogate pair, which is no character"
        raise ConversationError(place, reason, "Write the whole character")
    return {"role": role, "content": content}


def _question(fields: Mapping[str, object], label_key: str) -> list[dict[str, Any]]:
    """Return the messages of a question and its answer, as Alpaca's files have them."""
    asked = [fields.get(name) for name in ("instruction", "input")]
    texts = [text for text in asked if isinstance(text, str) and text.strip()]
    if not texts or fields.get(label_key) is None:
        has = ", ".join(str(key) for key in fields) or "none"
        reason = f"is no conversation: it has the fields {has}"
        hint = f"Write {CONVERSATIONS[0]}, or instruction or input, and {label_key}"
        raise ConversationError("the example", reason, hint)
    turns = []
    for number, pair in enumerate(_pairs(fields.get("history")), start=1):
        for role, text in zip(("user", "assistant"), pair, strict=True):
            turns.append(_message(f"history, pair {number}", role, text))
    turns.append(_message("instruction", "user", "\n".join(texts)))
    return [*turns, _message(label_key, "assistant", fields[label_key])]


def _pairs(history: object) -> list[Sequence[object]]:
    pairs = [] if history is None else history
    if not isinstance(pairs, list) or not all(isinstance(p, list) and len(p) == 2 for p in pairs):
        hint = "Write [[question, answer], …]"
        raise ConversationError("history", "is no list of questions with answers", hint)
    return pairs


def tokenized_conversations(
    spec: InstructionSpec, examples: Sequence[Example], chat: Chat, longest: int
) -> tuple[list[tuple[list[int], NDArray[np.bool_]]], int]:
    """Return the tokens of conversations with those that are counted, and how many were cut.

    Raises:
        DataError: An example is no conversation that the template renders, or is too long.
    """
    end = (chat.tokenizer.eod_id,) if spec.add_eos else ()
    frame = frame_of(chat.tokenizer, bool(spec.add_bos), end, "model.data.train_ds.add_bos")
    found, faults, num_cut = [], Faults(), 0
    for example in examples:
        try:
            ids, counted = chat.marked(conversation_of(example.fields, spec.label_key))
        except ConversationError as error:
            faults.add(error.reason, example, error.field, error.reason, error.hint)
            continue
        more = [np.zeros(len(frame.before(ids))), counted, np.ones(len(frame.after(ids)))]
        ids, counted = frame.around(ids), np.concatenate(more).astype(np.bool_)
        if not spec.answer_only_loss:
            counted[:] = True
        if len(ids) > longest:
            if spec.truncation_field not in CONVERSATIONS:
                faults.add("length", example, "length", *_too_long(len(ids), longest))
                continue
            ids, counted, num_cut = ids[:longest], counted[:longest], num_cut + 1
        counted[:1] = False  # nothing predicts an example's first token
        if not counted.any():
            reason = f"has no answer within {longest} tokens, which a sequence takes"
            hint = "Raise model.encoder_seq_length, or leave the example out"
            faults.add("cut", example, "length", reason, hint)
        found.append((ids, counted))
    faults.raise_first()
    return found, num_cut


def _too_long(length: int, longest: int) -> tuple[str, str]:
    """Return a reason and a hint; a sample of `longest` is a sequence and the token after it."""
    return (
        f"is {length} tokens, and a sequence of model.encoder_seq_length={longest - 1} takes "
        f"{longest}",
        "Raise model.encoder_seq_length, or leave the example out; "
        f"model.data.train_ds.truncation_field={CONVERSATIONS[0]} cuts the ends of conversations",
    )
