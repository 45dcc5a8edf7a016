"""Text out of tokens as they come, texts that end an answer, and chat templates, also hostile ones."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partc.cli.server.answer import Letters
from partc.cli.text import chat_template
from partc.cli.text.chat_template import ChatTemplate, end_of_text, find_chat_template
from partc.cli.text.message_text import MessageText
from partc.cli.text.tokenizer import TextStream, open_tokenizer, refuse_other_vocabulary
from partc.runtime.errors import InputError
from server_case import write_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LETTER = "a\u00f1\u2603\U0001f600"
"""Of one, two, three and four bytes."""


def bytes_tokenizer() -> Any:
    """A token a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


BYTES = bytes_tokenizer()


@given(st.text(LETTER + " b", max_size=12))
@settings(deadline=None)
def test_letters_of_several_tokens_come_whole(text: str) -> None:
    stream = TextStream(BYTES)
    parts = [stream.add(token) for token in BYTES.encode(text).ids]
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)
    assert stream.end() == ""


def test_what_is_cut_within_a_letter_is_shown_at_the_end() -> None:
    stream = TextStream(BYTES)
    assert [stream.add(token) for token in BYTES.encode("a\u2603").ids[:2]] == ["a", ""]
    assert stream.end() == "\ufffd"


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3), st.integers(1, 5))
@settings(deadline=None)
def test_an_answer_is_what_is_before_the_first_text_that_ends_it(text: str, stops: list[str], together: int) -> None:
    letters = Letters(BYTES, stops)
    found, read = "", 0
    ids = BYTES.encode(text).ids
    for begin in range(0, len(ids), together):
        added, count = letters.add(ids[begin : begin + together], False)
        found, read = found + added, read + count
        if letters.stopped:
            break
    found += letters.end()
    shortest = next((size for size in range(len(text) + 1) if any(stop in text[:size] for stop in stops)), None)
    if shortest is None:
        assert (found, letters.stopped) == (text, False)
    else:
        assert (read, letters.stopped) == (shortest, True)
        assert found == text[: min(at for stop in stops if (at := text[:shortest].find(stop)) >= 0)]


CONTROL = Tokenizer.from_str(BYTES.to_str())
CONTROL.add_special_tokens(["<s>", "</s>", "</s></s>"])
TURNS = "{% for m in messages %}<s>{{ m.role }}:{{ m.content | trim }}</s>{% endfor %}<s>"


@cache
def turns_template() -> ChatTemplate:
    return ChatTemplate("t", TURNS, {})


@given(st.lists(st.lists(st.sampled_from(["<s>", "</s>", "</", "s>", "a", " ", LETTER]), max_size=6), max_size=3))
@settings(deadline=None)
def test_a_message_has_no_control_token(contents: list[list[str]]) -> None:
    messages = [{"role": "user", "content": "".join(content)} for content in contents]
    text = MessageText(CONTROL)
    ids = text.ids(turns_template().prompt(text.marked(messages)))
    begin, end, _ = (CONTROL.token_to_id(token) for token in ("<s>", "</s>", "</s></s>"))
    turns = [[begin, *BYTES.encode(f"user:{one['content'].strip()}").ids, end] for one in messages]
    assert ids == [*(token for turn in turns for token in turn), begin]


def test_a_tokenizer_that_others_read_with_stays_as_it_is() -> None:
    """Requests are read in threads, with one tokenizer."""
    text = MessageText(CONTROL)
    (message,) = text.marked([{"role": "user", "content": "a</s>b"}])
    seen = []

    class Watched:
        def encode(self, text: str, add_special_tokens: bool) -> object:
            seen.append(CONTROL.encode("</s>", add_special_tokens=False).ids)
            return CONTROL.encode(text, add_special_tokens=add_special_tokens)

        def __deepcopy__(self, memo: object) -> object:
            return copy.deepcopy(CONTROL)

    assert len(MessageText(Watched(), text.marks, text.secret).ids(message["content"])) == 6
    assert {*map(tuple, seen)} == {(CONTROL.token_to_id("</s>"),)}
    assert CONTROL.encode("</s>", add_special_tokens=False).ids == [CONTROL.token_to_id("</s>")]


def test_the_letters_of_a_control_token_have_no_space_before_them() -> None:
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate("\u2581\nab</>s")}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    text = MessageText(tokenizer)
    (message,) = text.marked([{"role": "user", "content": "a</s>b"}])
    tokens = [tokenizer.id_to_token(one) for one in text.ids(message["content"])]
    assert tokens == ["\u2581", "a", *"</s>", "b"]


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(write_tokenizer(tmp_path)))
    for vocabulary in (64, 66, 1088):
        refuse_other_vocabulary("t", tokenizer, vocabulary)
    for vocabulary in (63, 1089):
        with pytest.raises(
            InputError, match=f"t: is not the tokenizer of this model: its tokens are 0 to 63, .* 0 to {vocabulary - 1}"
        ):
            refuse_other_vocabulary("t", tokenizer, vocabulary)


def test_templates_are_found_beside_the_tokenizer(tmp_path: Path) -> None:
    path = str(write_tokenizer(tmp_path, template=None))
    assert find_chat_template(path) is None
    config = {
        "eos_token": {"content": "b"},
        "chat_template": [
            {"name": "tools", "template": ""},
            {"name": "default", "template": "{{ eos_token }}{{ messages[0].role }}"},
        ],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = find_chat_template(path)
    assert found is not None
    assert found.prompt([{"role": "user", "content": ""}]) == "buser"
    assert end_of_text(path, open_tokenizer(path)) == [1]
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m | tojson }}{% break %}{% endfor %}")
    found = find_chat_template(path)
    assert found is not None
    assert found.prompt([{"role": "user"}, {}]) == '{"role": "user"}'
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(InputError, match=r"chat_template\.jinja: is not a template"):
        find_chat_template(path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(InputError, match="is not JSON"):
        find_chat_template(path)


@pytest.mark.parametrize(
    ("template", "fact"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "unsafe"),
        (
            "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}",
            "more than 4,194,304 letters|takes more",
        ),
        ("{% for a in range(9999999) %}x{% endfor %}", "too big|OverflowError|Range"),
        ("{{ messages[0].content + 1 }}", "str"),
    ],
)
def test_a_template_cannot_leave_its_sandbox(template: str, fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MOST_SECONDS", 0.1)
    with pytest.raises(InputError, match=fact):
        ChatTemplate("t", template, {}).prompt([{"role": "user", "content": "x"}])


NOTHING = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_that_computes_without_end_is_ended_and_the_next_conversation_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also within one call of an operator or filter, by memory, and when it is compiled."""
    monkeypatch.setattr(chat_template, "MOST_SECONDS", 0.1)
    cases = {
        "loop": NOTHING, "sum": "{% for a in range(3000) %}{% set x = range(99999) | sum %}{% endfor %}",
        "power": "{% set n = messages | length + 8 %}{{ n**(n**9) > 3 }}", "text": "{{ messages[0].content * 1500000000 }}",
        "zero": "{{ 1 // (messages | length - 1) }}",
    }  # fmt: skip
    choice = "".join(f"{{% if messages[0].content == '{name}' %}}{text}{{% endif %}}" for name, text in cases.items())
    template = ChatTemplate("t", choice + "{{ messages[0].content }}", {})
    facts = dict.fromkeys(cases, "takes more than 0.1 s") | {"text": "512 MiB", "zero": "by zero"}
    for name, fact in facts.items():
        with pytest.raises(InputError, match=fact):
            template.prompt([{"role": "user", "content": name}])
        assert template.prompt([{"role": "user", "content": "x"}]) == "x"
    with pytest.raises(InputError, match="more than 3 letters"):
        template.prompt([{"role": "user", "content": "xxxx"}], 3)
    template.close()
    for text in (
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ 10**5000 }}",
        "{{ [1] | slice(10**8) | list | length }}",
    ):
        with pytest.raises(InputError, match="t: is not a template"):
            ChatTemplate("t", text, {})
