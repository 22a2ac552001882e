"""Prompts of every kind, to compare the embedded model with transformers. All text was written for this purpose."""

from __future__ import annotations

from dataclasses import dataclass

Message = dict[str, str]


@dataclass(frozen=True)
class Prompt:
    """One prompt. `text` is the input of the model; a chat is rendered in SmolLM2's format, with special tokens."""

    name: str
    text: str
    messages: tuple[Message, ...] = ()
    """The messages of a chat, for /v1/chat/completions. They render to `text`."""


DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def _chat(name: str, *turns: str, system: str | None = None) -> Prompt:
    """Make a chat. Turns alternate between user and assistant, and end with the user."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": turn} for index, turn in enumerate(turns)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    shown = messages if system is not None else [{"role": "system", "content": DEFAULT_SYSTEM}, *messages]
    text = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in shown)
    return Prompt(name, text + "<|im_start|>assistant\n", tuple(messages))


def long_text(paragraphs: int) -> str:
    """Return a diary of a lighthouse: about 66 tokens per paragraph, all different."""
    weather = ("fog", "a hard wind from the west", "clear skies", "rain until noon", "the first snow")
    guests = ("a painter", "two fishermen", "nobody at all", "the doctor with her dog", "a boat full of singers")
    repairs = ("the lamp", "the north window", "the stairs", "the radio", "the bell on the jetty")
    return "\n\n".join(
        f"Day {day}. We had {weather[day % 5]}, and {guests[day * 3 % 5]} came up the path before supper. "
        f"I mended {repairs[day * 7 % 5]} and wrote down {day * 37 % 101} ships, {day * 13 % 17} of them under sail. "
        f"Tomorrow I must ask about the oil, because the barrel is down to {100 - day % 90} litres."
        for day in range(1, paragraphs + 1)
    )


CODE = '''def moving_average(values, width):
    """Return the mean of each window of `width` values."""
    total = 0.0
    for index, value in enumerate(values):
        total += value
        if index >= width:
            total -= values[index - width]
'''

PROMPTS: tuple[Prompt, ...] = (
    Prompt("one token", "The"),
    Prompt("one special token", "<|im_start|>"),
    Prompt("two tokens", "Once upon"),
    Prompt("a sentence", "The lighthouse keeper climbed the stairs every evening because"),
    Prompt("a question", "Q: What is the boiling point of water at sea level?\nA:"),
    Prompt("a list", "Three things to take on a long walk:\n1."),
    Prompt("numbers", "2, 4, 8, 16, 32, 64,"),
    Prompt("spaces", "one   two    three     four      "),
    Prompt("lines", "first\n\nsecond\n\n\nthird\n\n"),
    Prompt("python", CODE),
    Prompt("json", '{"name": "Ada", "age": 36, "skills": ["weaving", "mathematics"], "city":'),
    Prompt("sql", "SELECT customer, SUM(amount) AS total FROM orders WHERE year = 2024 GROUP BY"),
    Prompt("chinese", "春天来了，山上的花都开了。孩子们跑到河边，"),
    Prompt("arabic", "في الصباح الباكر خرج الصياد إلى البحر وهو يحمل"),
    Prompt("hindi", "एक समय की बात है, एक छोटे से गाँव में एक लड़की रहती थी जो"),
    Prompt("japanese", "駅の前に小さな喫茶店があります。毎朝、店の主人は"),
    Prompt("russian", "Старый мост через реку построили давно, и теперь по нему"),
    Prompt("emoji", "Weather today: ☀️🌤️⛅ tomorrow: 🌧️⛈️ and then 🌈👨‍👩‍👧‍👦"),
    Prompt("greek letters and signs", "∑ αᵢ·xᵢ ≤ √(β + γ) ⇒ ∀ε > 0 ∃δ:"),
    Prompt("repetition", "la " * 120),
    _chat("chat of one turn", "What is the capital of France? Answer in one sentence."),
    _chat("chat with a system prompt", "Who are you?", system="You are a pirate who answers in short sentences."),
    _chat(
        "chat of three turns",
        "I have three apples and buy two more. How many do I have?",
        "You have five apples.",
        "I eat one of them. How many are left?",
        "Four apples are left.",
        "And if a friend gives me twice as many as I have now?",
    ),
    _chat("chat in chinese", "你好！请用一句话介绍一下北京。"),
    _chat("chat with code", "Explain what this function does:\n```python\n" + CODE + "```", system="Be brief."),
    _chat("chat with emoji", "Tell me a story about 🐢 and 🐇 in two lines 🙏"),
    Prompt("a thousand tokens", long_text(15) + "\n\nDay 16."),
    Prompt("four thousand tokens", long_text(60) + "\n\nDay 61."),
)
