"""Text to token ids and back: a `tokenizer.json` with its chat template."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as HfTokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what half a character decodes to


class Tokenizer:
    """A tokenizer directory in the Hugging Face layout.

    Args:
      directory: holds `tokenizer.json`; `tokenizer_config.json` or `chat_template.jinja` may
        bring a chat template.

    Raises:
      FileNotFoundError: no tokenizer.json.
      ValueError: a file is damaged.
    """

    def __init__(self, directory: str | Path):
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} not found; the model directory must hold its tokenizer.json."
            )
        try:
            self._tokenizer = HfTokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception
            raise ValueError(f"{path} is not a tokenizer file ({error}).") from error
        self._special, template = {}, None
        config_path = directory / "tokenizer_config.json"
        if config_path.is_file():
            config = json.loads(config_path.read_text(encoding="utf-8"))
            template = config.get("chat_template")
            names = ("bos_token", "eos_token", "unk_token", "pad_token")
            self._special = {n: _content(config[n]) for n in names if config.get(n)}
        template_path = directory / "chat_template.jinja"
        if template_path.is_file():
            template = template_path.read_text(encoding="utf-8")
        if isinstance(template, list):
            template = next((t["template"] for t in template if t["name"] == "default"), None)
        self._template = _compile(template) if template else None

    @property
    def vocab_size(self) -> int:
        """Known tokens; a model's vocabulary may be padded beyond it."""
        return self._tokenizer.get_vocab_size()

    @property
    def has_chat_template(self) -> bool:
        """Can `encode_chat` be used?"""
        return self._template is not None

    def token_id(self, token: str) -> int | None:
        """The id of a token by its text, None if there is none."""
        return self._tokenizer.token_to_id(token)

    @property
    def eos_token_id(self) -> int | None:
        """The end token named by the tokenizer's config."""
        eos = self._special.get("eos_token")
        return None if eos is None else self.token_id(eos)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
          text: any text; special tokens written out in it become single ids.
          special: also add what the tokenizer puts around a text, such as BOS.

        Returns:
          Token ids.
        """
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids; ids past the tokenizer's vocabulary are left out."""
        known = [i for i in ids if self._tokenizer.id_to_token(i) is not None]
        return self._tokenizer.decode(known, skip_special_tokens=skip_special)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool = True
    ) -> str:
        """The text a conversation is fed to the model as.

        Args:
          messages: dicts with `role` and `content`.
          generation_prompt: end with the header of the assistant's turn.

        Returns:
          The rendered template.

        Raises:
          ValueError: there is no chat template, or it refuses the messages.
        """
        if self._template is None:
            raise ValueError(
                "this model has no chat template; use the completions interface, or add "
                "chat_template to tokenizer_config.json."
            )
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=generation_prompt,
                enable_thinking=False,
                tools=None,
                **self._special,
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of `render_chat`."""
        return self.encode(self.render_chat(messages, generation_prompt=generation_prompt))


class TextStream:
    """Decodes a growing sequence of tokens without ever splitting a character.

    Args:
      tokenizer: decodes.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # decoding restarts here: enough context for joins, never the whole
        self._read = 0  # everything before this has been returned

    def push(self, token: int) -> str:
        """Text that became certain with this token, possibly none."""
        self._ids.append(token)
        before = self._tokenizer.decode(self._ids[self._start : self._read])
        now = self._tokenizer.decode(self._ids[self._start :])
        if now.endswith(UNFINISHED) or len(now) <= len(before):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return now[len(before) :]

    def flush(self) -> str:
        """The rest, an unfinished character included."""
        before = self._tokenizer.decode(self._ids[self._start : self._read])
        now = self._tokenizer.decode(self._ids[self._start :])
        self._start = self._read = len(self._ids)
        return now[len(before) :]


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _compile(template: str) -> jinja2.Template:
    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False)
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template cannot be read: {error}") from error
