"""Forty prompts of the kinds that break tokenizers and caches: chat, code, digits, CJK, emoji."""

CHAT = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in one sentence why the sky is blue.",
    "Give me three names for a grey cat.",
    "How do I boil an egg so that the yolk stays soft?",
    "Translate 'good morning' into Spanish.",
    "What is the difference between a list and a tuple in Python?",
    "Who wrote Romeo and Juliet?",
]
CODE = [
    "def fibonacci(n):\n    ",
    "for (int i = 0; i < n; ++i) {\n\tsum += ",
    "SELECT name, COUNT(*) FROM orders WHERE ",
    "import numpy as np\n\nx = np.linspace(0, 1, 11)\nprint(",
    '{"name": "fox", "colour": "brown", "legs": ',
    "#!/bin/bash\nset -euo pipefail\n\nfor f in *.txt; do\n  ",
    "<html>\n  <head>\n    <title>",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
]
DIGITS = [
    "1, 2, 3, 4, 5, 6, ",
    "In 2024, 1,234,567 people visited; in 2025",
    "3.14159265358979",
    "17 + 25 =",
    "100 99 98 97 96",
    "0x7fff 0b1010 1e-9",
    "Call 555-0199 between 9:00 and 17:30",
    "2 4 8 16 32 64 128",
]
CJK = [
    "こんにちは、世界。今日は",
    "北京是中国的",
    "서울은 대한민국의",
    "吾輩は猫である。名前は",
    "学而时习之,不亦",
    "日本の首都は",
    "한국어로 인사하기:",
    "春眠不觉晓,处处",
]
EMOJI = [
    "🦊 The fox said: ",
    "👩‍🚀🚀🌕 means",
    "I ❤️ pizza 🍕 and",
    "🇫🇷 🇩🇪 🇯🇵",
    "Weather today: ☀️🌧️",
    "🙂🙃😉 ",
    "\u202eright to left\u202c and\u00a0back",
    "naïve café — “quotes” … €5",
]
PROMPTS = [*CHAT, *CODE, *DIGITS, *CJK, *EMOJI]
assert len(PROMPTS) == 40
