"""Conversations as training samples: token ids and a loss mask over the assistant's tokens.

The file format is DeepSpec's: one JSON object a line, `{"id", "conversations": [{"role",
"content"}, ..]}`, here with two optional fields: `truncated` (the last answer hit a length limit
and has no end marker) and `temperature` (of the answers).
"""

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2.sandbox
import numpy as np
from tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One tokenised conversation.

    Attributes:
      id: the conversation's id.
      tokens: i32[S].
      loss_mask: bool[S], true where the assistant wrote the token (end marker included).
      temperature: what the answers were sampled at, None where the file does not say.
    """

    id: str
    tokens: np.ndarray
    loss_mask: np.ndarray
    temperature: float | None = None


class ChatEncoder:
    """Turns conversations into samples with the target's own tokenizer and chat template.

    Args:
      directory: the target's checkpoint directory (tokenizer.json, tokenizer_config.json).

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: there is no chat template.
    """

    def __init__(self, directory: str | Path):
        directory = Path(directory)
        files = [directory / "tokenizer.json", directory / "tokenizer_config.json"]
        for path in files:
            if not path.is_file():
                raise FileNotFoundError(
                    f"{path} not found; training on text needs the target's tokenizer files."
                )
        self.tokenizer = Tokenizer.from_file(str(files[0]))
        config = json.loads(files[1].read_text(encoding="utf-8"))
        separate = directory / "chat_template.jinja"
        template = config.get("chat_template")
        if template is None and separate.is_file():
            template = separate.read_text(encoding="utf-8")
        if not isinstance(template, str):
            raise ValueError(
                f"{directory} has no single chat template (tokenizer_config.json `chat_template` "
                "or chat_template.jinja); the answers cannot be told from the prompts without one."
            )
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise
        self._template = environment.from_string(template)
        special = ("bos_token", "eos_token", "pad_token", "unk_token")
        self._special = {k: _token_text(config.get(k)) for k in special}

    def render(self, messages: list[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """The conversation as the text that the target reads."""
        return self._template.render(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=False,
            **self._special,
        )

    def encode(
        self,
        conversation: Mapping[str, Any],
        *,
        max_length: int,
        roles: Collection[str] = ("assistant",),
    ) -> Sample:
        """Tokenises one conversation.

        Prompt and answer are encoded apart, as they are when the target generates, so that a
        merge never joins the last prompt character with the first of the answer.

        Args:
          conversation: an object of the file.
          max_length: tokens kept; the rest is cut off.
          roles: whose messages count for the loss, end marker included; "user" belongs here only
            where the target wrote those turns as well.

        Returns:
          The sample.

        Raises:
          ValueError: the object has no usable messages, or the template rewrites history so that
            the answer cannot be located in the text.
        """
        where = f"conversation {conversation.get('id')!r}"
        messages = conversation.get("conversations")
        if not isinstance(messages, list) or not messages:
            raise ValueError(f"{where} has no list `conversations` of messages.")
        parts, done, pending = [], "", []  # text, and where in it the loss applies
        for i, message in enumerate(messages):
            if not {"role", "content"} <= set(message):
                raise ValueError(f"{where}: message {i} lacks role or content.")
            full = self.render(messages[: i + 1], add_generation_prompt=False)
            if message["role"] != "assistant":
                begin = full.rfind(message["content"])
                if message["role"] in roles and begin >= 0:
                    pending.append((begin, len(full)))
                continue
            head = self.render(messages[:i], add_generation_prompt=True)
            if not head.startswith(done) or not full.startswith(head):
                raise ValueError(
                    f"{where}: the chat template changes earlier turns at message {i}; split the "
                    "conversation so that each answer is the last message of its own line."
                )
            answer = full[len(head) :]
            if conversation.get("truncated") and i == len(messages) - 1:
                answer = message["content"]
            spans = [(begin - len(done), end - len(done)) for begin, end in pending]
            whole = [(0, len(answer))] if "assistant" in roles else []
            parts += [(head[len(done) :], spans), (answer, whole)]
            done, pending = full, []
        ids, mask = [np.zeros(0, np.int32)], [np.zeros(0, bool)]
        for text, spans in parts:
            encoded = self.tokenizer.encode(text, add_special_tokens=False)
            begins = np.array([begin for begin, _ in encoded.offsets], np.int64)
            inside = [(begins >= begin) & (begins < end) for begin, end in spans]
            ids.append(np.array(encoded.ids, np.int32))
            mask.append(np.any(inside, axis=0) if inside else np.zeros(len(begins), bool))
        return Sample(
            id=str(conversation.get("id")),
            tokens=np.concatenate(ids)[:max_length],
            loss_mask=np.concatenate(mask)[:max_length],
            temperature=conversation.get("temperature"),
        )


def read_conversations(path: str | Path) -> Iterator[dict[str, Any]]:
    """Reads a JSONL file of conversations.

    Args:
      path: the file; blank lines are skipped.

    Yields:
      One object a line.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a line is not a JSON object; the message names the line.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found; expected a JSONL file of conversations.")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not valid JSON ({error}).") from error
            if not isinstance(value, dict):
                raise ValueError(
                    f"{path}, line {number}: got a {type(value).__name__}, expected an object."
                )
            yield value


def load_samples(
    path: str | Path,
    encoder: ChatEncoder,
    *,
    max_length: int,
    min_loss_tokens: int = 14,
    roles: Collection[str] = ("assistant",),
) -> list[Sample]:
    """Reads and tokenises a file, dropping samples with too little to learn from.

    Args:
      path: JSONL of conversations.
      encoder: the target's tokenizer and template.
      max_length: tokens kept of each.
      min_loss_tokens: samples with fewer assistant tokens are dropped, as DeepSpec does.
      roles: whose messages count for the loss.

    Returns:
      The samples in file order.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a line is damaged, or nothing is left.
    """
    samples = [
        encoder.encode(c, max_length=max_length, roles=roles) for c in read_conversations(path)
    ]
    samples = [s for s in samples if s.loss_mask.sum() >= min_loss_tokens]
    if not samples:
        raise ValueError(
            f"{path} has no conversation with at least {min_loss_tokens} assistant tokens."
        )
    return samples


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value


def _raise(message: str) -> None:
    raise ValueError(f"chat template: {message}")
