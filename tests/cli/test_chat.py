import io
import json
import re
import shutil
import signal
import stat
import string
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from quire.api.llm import LLM
from quire.cli import chat

QUICK = ("--kv-memory", "2MiB", "--no-verify", "--max-tokens", "5", "--dtype", "float32")
ASSETS = Path(chat.__file__).parents[1] / "assets"


@pytest.fixture
def history(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "quire" / "chat_history"


def typed(text: str, messages: int) -> list[str | None]:
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        read = chat._editor(["/help"])
        pipe.send_text(text)
        return [read() for _ in range(messages)]


def test_commands_are_explained_and_unknown_ones_refused(quire):
    result = quire("chat", *QUICK, input="/help\n/stat\n/stats\nhello\n/stats\n/exit\n")

    assert result.exit_code == 0
    for name in ("/help", "/clear", "/stats", "/exit", "Alt+Enter", "Ctrl-C"):
        assert f"\n{name} " in result.stderr
    assert "error: unknown command '/stat': expected /help, /retry, /clear" in result.stderr
    assert "last response: none yet" in result.stderr
    assert "conversation: 2 messages, 9 of 257 tokens that fit into the KV memory" in result.stderr
    assert "5 output tokens" in result.stderr
    assert "of 2.00 MiB" in result.stderr
    assert len(result.stdout.splitlines()) == 1


def test_saved_messages_are_a_request_body_and_are_loaded_again(quire, tmp_path):
    file = tmp_path / "chat.json"
    first = quire("chat", *QUICK, input=f"/system Be short.\nhello\n/save {file}\n/load\n/save .\n")
    again = quire("chat", *QUICK, input=f"/load {file}\n/retry\n")

    roles = [message["role"] for message in json.loads(file.read_text())["messages"]]
    assert roles == ["system", "user", "assistant"]
    assert json.loads(file.read_text())["model"] == "quire-tiny"
    assert "(system message set)" in first.stderr
    assert "error: expected /load FILE, got /load" in first.stderr
    assert "error: . cannot be written" in first.stderr
    assert again.stdout == first.stdout
    assert f"(3 messages loaded from {file})" in again.stderr


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "cannot be read"), ("[", "not valid JSON"), ("{}", "expected a list of messages")],
)
def test_invalid_saved_file_leaves_the_conversation_as_it_was(quire, tmp_path, content, problem):
    file = tmp_path / "chat.json"
    if content is not None:
        file.write_text(content)

    result = quire("chat", *QUICK, input=f"hello\n/load {file}\n/stats\n/clear\n/retry\n")

    assert problem in result.stderr
    assert "conversation: 2 messages" in result.stderr
    assert "error: expected a message before /retry, got none" in result.stderr


def test_sampling_options_are_set_in_the_chat(quire):
    wrong = "/set temperature warm\n/set n 2\n/set temperature\n"
    result = quire("chat", *QUICK, input=f"/set max-tokens 2\n/set\nhello\n{wrong}/stats\n")

    assert result.stderr.startswith("quire-tiny: max_tokens 5, temperature 0 (the model's); /set")
    assert result.stderr.count("max_tokens 2, temperature 0 (the model's)") == 2
    assert "2 output tokens" in result.stderr
    assert "error: temperature must be a finite number in [0, inf), got 'warm'" in result.stderr
    assert "\ntemperature 0 (the model's): divides the logits; " in result.stderr
    assert "else 0.2, with top-p 0.9; /set temperature VALUE changes it, " in result.stderr
    assert "/set temperature default restores the default\n" in result.stderr
    assert "unknown sampling option 'n'" in result.stderr


@pytest.mark.parametrize(
    ("memory", "tokens", "note", "stats"),
    [
        ("512KiB", 61, "61, the rest of the KV memory: a larger", "65 of 65 tokens that"),
        ("40MiB", 512, "512: /set max_tokens N raises it]", "516 of 4,096 tokens of context"),
    ],
)
def test_responses_are_limited_to_the_kv_memory(quire, memory, tokens, note, stats):
    options = ("--kv-memory", memory, "--no-verify", "--dtype", "float32", "--ignore-eos")
    result = quire("chat", *options, input="hello\n/stats\n" + "word " * 5_000 + "\n/stats\n")

    assert f"\n[cut at max_tokens={note}" in result.stderr
    assert f"[4 prompt tokens, {tokens} output tokens" in result.stderr
    assert result.stderr.count(f"conversation: 2 messages, {stats}") == 2
    assert "error: the conversation of " in result.stderr
    assert ": /clear starts over (/save FILE first keeps it)" in result.stderr
    first = quire("chat", *options, input="word " * 5_000 + "\nhello\n")
    refusal = first.stderr.partition("error: ")[2].partition("\n")[0]
    assert refusal.startswith("the message of ")
    assert "/clear" not in refusal
    assert first.stdout.strip()  # the chat continues


def test_memory_that_a_long_conversation_is_advised_leaves_room_for_the_response(quire):
    options = ("--no-verify", "--dtype", "float32", "--ignore-eos", "--max-tokens", "20")
    messages = "hello\n" + "word " * 60 + "\n"
    refused = quire("chat", "--kv-memory", "512KiB", *options, input=messages)
    found = re.search(r"--kv-memory (\S+) leaves room, or --evict RULE:cap", refused.stderr)
    assert found is not None
    enough = quire("chat", "--kv-memory", found[1], *options, input=messages)

    assert "error" not in enough.stderr
    assert enough.stderr.count("[cut at max_tokens=20: /set max_tokens N raises it]") == 2


def test_retry_responds_to_a_refused_message_unless_others_are_loaded(quire, tmp_path):
    options = ("--kv-memory", "512KiB", "--no-verify", "--dtype", "float32", "--ignore-eos")
    long = "word " * 40
    result = quire("chat", *options, input=f"hello\n{long}\n/clear\n/retry\n/stats\n/quit\nhi\n")
    file = tmp_path / "chat.json"
    loaded = f"hello\n/save {file}\n{long}\n/load {file}\n/retry\n/stats\n"
    reloaded = quire("chat", *options, input=loaded)

    assert result.stderr.count("error") == 1
    first, again, *rest = re.findall(r"\[cut at max_tokens=(\d+),", result.stderr)
    assert int(again) < int(first)  # the prompt is the long message
    assert rest == []
    assert "conversation: 2 messages" in result.stderr
    assert reloaded.stderr.count("error") == 1
    assert len(set(re.findall(r"\[cut at max_tokens=(\d+),", reloaded.stderr))) == 1


def test_an_output_that_ends_at_once_is_named(quire):
    ends = ("--temperature", "0", *(f"--stop={letter}" for letter in string.printable[:94]))
    talk = quire("chat", *QUICK, *ends, input="hello\n")
    generated = quire("generate", "quire-tiny", "x", "--no-verify", *ends)
    assert "[no text: the output ended at once; /set min_tokens N makes it go on]" in talk.stderr
    assert "[no text: the output ended at once; --min-tokens N makes it go on" in generated.stderr
    assert talk.stdout == generated.stdout == "\n"


def test_model_that_names_no_temperature_gets_that_of_a_chat(quire, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(ASSETS / "quire-tiny", folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')

    changes = "/set temperature 0.5\n/set temperature default\n/set max_tokens default\n"
    stop = "/set stop default\n/set stop .\n/set stop\n/set stop default\n/set temperature\n"
    unset = quire("chat", folder, *QUICK, input=changes + stop)
    given = quire("chat", folder, *QUICK, "--temperature", "0.7", "--seed", "1", input="")

    first, _, own, restored, longer, same, stopped, shown, none, last = unset.stderr.splitlines()
    assert first.removeprefix("model: ") == restored
    assert "temperature 0.2 (Quire's default), top_p 0.9 (Quire's default); /set" in first
    assert own == "max_tokens 5, temperature 0.5; /set changes them"
    assert longer == same == none == restored.replace("max_tokens 5,", "max_tokens 512,")
    assert stopped == longer.replace("; /set", ', stop ["."]; /set')
    assert shown.startswith('stop ["."]: stop strings')
    assert last.startswith("temperature 0.2 (Quire's default): divides the logits")
    of_options = "model: max_tokens 5, temperature 0.7, seed 1; /set changes them"
    assert given.stderr.splitlines()[0] == of_options


def test_lines_break_between_words_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def shown(stream: io.StringIO, *parts: str) -> str:
        wrap = chat.WordWrap(stream)
        for part in parts:
            wrap.write(part)
        wrap.end()
        return stream.getvalue()

    monkeypatch.setenv("COLUMNS", "10")
    assert shown(Terminal(), "one tw", "o thr", "ee\n  four") == "one two\nthree\n  four\n"
    assert shown(Terminal(), "0123456789 a bcd") == "0123456789\na bcd\n"  # a full line
    assert shown(Terminal(), "a 0123456789012 bc defgh") == "a\n0123456789012 bc\ndefgh\n"
    assert shown(Terminal(), "漢字漢字漢字") == "漢字漢字漢\n字\n"
    assert shown(io.StringIO(), "one two three", " four") == "one two three four\n"


def test_backslash_continues_a_message_and_two_slashes_send_one(quire, monkeypatch):
    sent = []
    talk = chat.Conversation
    monkeypatch.setattr(talk, "respond", lambda self, message: sent.append(message))

    quire("chat", *QUICK, input="//help\none\\\ntwo\nthree\\\n")

    assert sent == ["/help", "one\ntwo", "three"]


def test_interrupt_stops_the_response_and_not_the_chat(quire, monkeypatch):
    stream, sent = LLM.stream, []

    def interrupted(self, *arguments, **options):
        for delta in stream(self, *arguments, **options):
            sent.append(delta.text)
            if len(sent) == 2:
                signal.raise_signal(signal.SIGINT)
            yield delta

    monkeypatch.setattr(LLM, "stream", interrupted)

    result = quire("chat", *QUICK, input="hello\nhello\n/exit\n")

    first, second = result.stdout.splitlines()
    assert result.exit_code == 0
    assert len(sent) == 2 + 5
    assert len(first) < len(second)


def test_chat_templates_of_models_and_files_are_used_or_missed(quire, tmp_path):
    folder = tmp_path / "plain"
    shutil.copytree(ASSETS / "quire-tiny", folder)
    (folder / "chat_template.jinja").unlink()

    result = quire("chat", folder, *QUICK, input="hello\n")

    assert result.exit_code == 2
    assert result.stdout == ""
    assert "plain has no chat template, which quire chat needs" in result.stderr
    assert f"quire generate {folder} PROMPT" in result.stderr
    assert "pass --chat-template FILE" in result.stderr

    template = tmp_path / "template.jinja"
    missing = quire("chat", *QUICK, "--chat-template", template, input="hello\n")
    template.write_text("One, two, {{ messages[-1].content }},")

    found = quire("chat", *QUICK, "--chat-template", template, input="three\n")

    assert missing.exit_code == 2
    assert "cannot read --chat-template" in missing.stderr
    assert found.exit_code == 0
    assert found.stdout == quire("generate", "quire-tiny", "One, two, three,", *QUICK).stdout
    assert found.stdout != quire("chat", *QUICK, input="three\n").stdout


def test_keys_of_the_editor_and_an_interrupt_that_discards_the_line(history, capsys):
    assert typed("one\r", 1) == ["one"]
    assert typed("one\x1b\rtwo\r", 1) == ["one\ntwo"]  # Alt+Enter
    assert typed("one\\\rtwo\r", 1) == ["one\ntwo"]
    assert typed("\x04", 1) == typed("draft\x04", 1) == [None]  # Ctrl-D
    assert typed("draft\x03next\r", 1) == ["next"]
    assert "Ctrl-D or /exit exits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pressed", "stops", "ends"), [("next\r", 0, 0), ("x\x03", 1, 0), ("x\x04", 1, 1)]
)
def test_keys_pressed_during_a_response_are_input_of_the_next_prompt(
    pressed, stops, ends, history, monkeypatch
):
    monkeypatch.setattr(chat, "is_terminal", lambda stream: True)
    keyboard = chat.Keyboard()
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        read = chat._editor([])
        with keyboard.watched() as stopped:
            pipe.send_text(pressed)
            assert (stopped(), keyboard.ended) == (bool(stops), bool(ends))
        if not stops:
            assert read() == "next"


def test_messages_are_kept_in_the_state_folder(history):
    typed("first\rsecond\r", 2)

    lines = history.read_text().splitlines()
    assert [line for line in lines if line.startswith("+")] == ["+first", "+second"]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert list(chat._history().load_history_strings()) == ["second", "first"]


def test_history_stays_in_memory_without_a_writable_folder(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(blocked))

    assert isinstance(chat._history(), InMemoryHistory)
    home = Path("/home-of-user")
    for environment in ({}, {"XDG_STATE_HOME": "relative"}):
        found = chat.history_file(environment, home)
        assert found == home / ".local/state/quire/chat_history"
    assert chat.history_file({"XDG_STATE_HOME": "/s"}, home) == Path("/s/quire/chat_history")
    assert typed("one\r", 1) == ["one"]
