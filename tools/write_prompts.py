"""Writes prompts for training text: word problems, maths, code and chat, from templates.

    python tools/write_prompts.py --out prompts.jsonl --num 4000
    python -m dspark_jax.data generate --prompts prompts.jsonl --temperatures 0 --out text.jsonl

A draft accepts more on the kinds of text that it has seen. The kinds here are those that draft
models are commonly measured on; the prompts themselves are put together from the lists below and
from the docstrings of Python's standard library, so none comes from an evaluation set.
"""

import argparse
import importlib
import inspect
import json
import random
from collections.abc import Callable
from pathlib import Path

STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."
HEADER = "Write a solution to the following problem and make sure that it passes the tests:\n"

NAMES = """Ana Ben Carla Dmitri Elif Farid Greta Hana Ivan Joana Kofi Lena Marco Nadia Omar Priya
Quentin Rosa Samir Tomoko Ursula Viktor Wendy Xenia Yusuf Zoe Peter Laura Jack Emily Tom Maria
Daniel Sophie Kevin Rachel Lucas Mia""".split()
GOODS = """apples pencils marbles books stickers cookies eggs candles tickets bottles oranges
notebooks coins shirts cupcakes balloons flowers stamps cards bricks muffins pizzas toys shells
tomatoes chairs lamps plants crayons sandwiches""".split()
PLACES = """market bakery library farm school garage factory museum theatre restaurant bookshop
garden hospital stadium bakery aquarium zoo camp orchard workshop""".split()
MODULES = """textwrap statistics bisect heapq string shutil os.path itertools functools random
calendar colorsys fractions difflib fnmatch glob keyword linecache operator posixpath pprint
quopri re shlex struct tempfile tokenize types unicodedata uuid zlib math cmath json csv
collections copy datetime decimal enum html inspect ipaddress locale mimetypes numbers pathlib
platform secrets sched socket stat tarfile threading timeit traceback urllib.parse urllib.request
wave weakref zipfile base64 binascii hashlib hmac gzip bz2 lzma argparse ast email.utils
http.cookies logging subprocess contextlib dataclasses abc array queue selectors""".split()
COLLECTIONS = (
    "a list of integers", "a list of strings", "a tuple of numbers", "a nested list",
    "a dictionary of scores", "a list of tuples", "a string", "a sentence", "two lists",
    "a list of floats", "a matrix given as a list of rows", "a set of words", "a binary string",
    "a list of dictionaries", "two strings", "a sorted array", "an array of numbers",
)  # fmt: skip
CONDITIONS = (
    "that are even", "that are odd", "that are divisible by {n}", "greater than {n}",
    "shorter than {n} characters", "that appear more than once", "that start with a vowel",
    "that are prime", "that are perfect squares", "that are negative", "that occur exactly once",
    "at even positions", "at odd positions", "that contain a given character", "longer than {n}",
    "that are palindromes", "between {n} and {m}", "that end with a digit", "that are in uppercase",
)  # fmt: skip
MEASURES = (
    "the sum", "the product", "the largest", "the smallest", "the number", "the average",
    "the second largest", "the median", "the index of the first", "the last", "the difference "
    "between the largest and the smallest", "the position", "the most frequent", "the longest",
    "the shortest", "the k-th smallest", "the maximum product of two", "the running total",
)  # fmt: skip
CHECKS = (
    "a number is prime", "a string is a palindrome", "a year is a leap year", "two strings are "
    "anagrams", "a list is sorted", "a number is a perfect square", "a string has balanced "
    "brackets", "a number is a power of two", "a triangle with given sides is valid", "a string is "
    "a valid email address", "two lists share an element", "a word is an isogram", "a matrix is "
    "symmetric", "a number is an Armstrong number", "a string contains only digits", "a password "
    "has at least {n} characters and a digit", "a number is happy", "a list contains duplicates",
    "a point lies inside a circle", "a graph has a cycle", "a binary tree is balanced", "a date is "
    "valid", "a string matches a pattern with a wildcard", "a number is a palindrome", "all items "
    "of a tuple are equal", "a dictionary is empty", "a string is a pangram", "a tuple is a subset "
    "of another", "a sequence is arithmetic", "a number is divisible by {n}",
)  # fmt: skip
CHANGES = (
    "remove duplicates from", "reverse", "rotate by {n} positions", "sort in descending order",
    "flatten", "shuffle", "split into chunks of {n}", "remove the items {cond} from",
    "replace the items {cond} by zero in", "interleave the elements of", "group equal elements of",
    "pair up neighbouring elements of", "move all zeros to the end of", "capitalise every word of",
    "join with commas", "find all pairs with sum {n} in", "compute all permutations of",
    "remove whitespace from", "count the vowels in", "count the items {cond} in", "merge",
    "find the common elements of", "remove the first occurrence of a character from",
    "find the longest common prefix of", "swap the first and last element of", "zip together",
    "find all substrings of length {n} of", "compute the cumulative sums of", "encode with "
    "run-length encoding", "transpose", "find the most common word in", "filter the items {cond} "
    "out of", "sort by the second element", "compute the frequency of every element of",
)  # fmt: skip
FORMULAS = (
    "the area of a circle", "the volume of a cylinder", "the perimeter of a rectangle", "the "
    "surface area of a sphere", "the nth Fibonacci number", "the factorial of a number", "the "
    "greatest common divisor of two numbers", "the least common multiple of two numbers", "the nth "
    "triangular number", "the sum of the digits of a number", "the binomial coefficient", "the "
    "distance between two points", "the compound interest", "the number of days between two dates",
    "the nth Catalan number", "the square root by Newton's method", "the slope of a line", "the "
    "hypotenuse of a right triangle", "the body mass index", "the nth prime number", "the sum of "
    "the first n odd numbers", "the volume of a cone", "the median of three numbers", "the dot "
    "product of two vectors", "the determinant of a 2x2 matrix", "the Hamming distance", "the "
    "edit distance between two words", "the number of trailing zeros in n!", "the area of a "
    "trapezoid", "the nth hexagonal number", "the sum of divisors of a number", "the binary form "
    "of a number", "the roman numeral of a number", "the average of a list", "the standard "
    "deviation", "the number of set bits", "the angle between clock hands", "the day of the week",
)  # fmt: skip
PROGRAMS = (
    "binary search", "bubble sort", "quick sort", "merge sort", "a linked list", "a stack", "a "
    "queue using two stacks", "depth-first search", "breadth-first search", "Dijkstra's algorithm",
    "a binary search tree", "a hash map", "a least-recently-used cache", "a trie", "a min-heap",
    "matrix multiplication", "a tic-tac-toe game", "a number guessing game", "a to-do list", "a "
    "simple calculator", "a bank account class", "a word counter", "a CSV reader", "a timer", "a "
    "password generator", "a temperature converter", "the sieve of Eratosthenes", "a rate limiter",
    "a REST endpoint", "a producer and a consumer", "a Caesar cipher", "a text adventure",
)  # fmt: skip
LANGUAGES = ("Python", "Python", "Python", "JavaScript", "Java", "C++", "C", "SQL", "Go", "Rust")
TOPICS = """climate change|the water cycle|photosynthesis|the Roman Empire|black holes|inflation in
the economy|vaccines|the French Revolution|machine learning|renewable energy|the human heart|coffee
|chess|meditation|the Silk Road|volcanoes|the internet|sleep|gravity|democracy|whales|earthquakes|
jazz music|time management|remote work|public speaking|the stock market|antibiotics|space travel|
the printing press|ancient Egypt|electric cars|blockchain|the Great Wall|nutrition|poetry|robots|
biodiversity|the Cold War|quantum mechanics|marathon running|gardening|cloud computing|tea|bees|
urban planning|friendship|the moon|plate tectonics|supply and demand|neural networks|evolution|
databases|Shakespeare|the Industrial Revolution|healthy habits|object-oriented programming|
cybersecurity|the periodic table|languages|painting|the ocean|education|art museums|deserts|
artificial intelligence in medicine|microservices|data privacy|happiness|leadership|tourism|
football|the immune system|the solar system|bread baking|photography|a small fishing village|
a lost key|a talking cat|two old friends|a detective|a lighthouse keeper|a robot that dreams|
the last train|a hidden garden|a storm at sea|a letter from the future|a broken clock""".replace(
    "\n", " "
).split("|")
TASKS = (
    "Write a short story about {t}.", "Explain {t} to a ten-year-old.", "Write a poem about {t}.",
    "Give me five tips about {t}.", "What are the advantages and disadvantages of {t}?",
    "Write a blog post about {t} for beginners.", "Summarize the most important facts about {t}.",
    "Describe {t} in two paragraphs.", "Write an email to a colleague about {t}.",
    "Compare {t} with {u}.", "How does {t} influence everyday life? Give three examples.",
    "You are an expert on {t}. Answer the following question: why does it matter?",
    "Make a table with the main points about {t}.", "Write a dialogue about {t} between a teacher "
    "and a student.", "Create an outline for a presentation on {t}.", "What would happen without "
    "{t}? Explain your reasoning.", "Draft a professional report on {t}, with an introduction and "
    "a conclusion.", "Write three questions for a quiz about {t}, with answers.", "Imagine you are "
    "{t}. Introduce yourself.", "Write an opening paragraph of a novel about {t}.",
    "List ten ideas for a project about {t}.", "Explain the history of {t}.", "Rewrite this "
    "sentence in a formal style: {t} is really great and everyone likes it.", "Write a persuasive "
    "speech about {t}.", "What are common misconceptions about {t}?", "Develop a weekly plan to "
    "learn about {t}.", "Write a product description related to {t}.", "Act as an interviewer and "
    "ask me about {t}.", "Analyze the following statement: '{t} will change the world.'",
    "Give a step-by-step guide to get started with {t}.", "Write a review of a book about {t}.",
    "Explica {t} con palabras sencillas.", "Écris un court texte sur {t}.", "Schreibe eine kurze "
    "Geschichte über {t}.", "请介绍一下 {t}。", "Расскажи, пожалуйста, про {t}.", "Escreva um "
    "resumo sobre {t}.", "Extract the three key terms from this text and define them: {t} has been "
    "studied by many people, and its relation to {u} is still debated.", "Provide a detailed "
    "comparison of {t} and {u}, and say which one you would choose.",
)  # fmt: skip


def word_problem(rng: random.Random) -> str:
    """A problem about people, goods and prices, solvable or not: only its style matters."""
    a, b, c = (rng.randint(2, 60) for _ in range(3))
    big, part = rng.randint(5, 40) * 10, rng.choice(["half", "a third", "a quarter", "twice"])
    name, other = rng.sample(NAMES, 2)
    good, more = rng.sample(GOODS, 2)
    place = rng.choice(PLACES)
    opening = rng.choice([
        f"{name} has {a} {good} and buys {b} more at the {place}.",
        f"{name} sells {a} {good} every day at the {place} for ${b} each.",
        f"A {place} has {big} {good}. On Monday {a} of them are sold, and on Tuesday {b}.",
        f"{name} reads {a} pages a day, and {other} reads {part} as many.",
        f"{name} earns ${a} an hour and works {b} hours a week at the {place}.",
        f"There are {big} people at the {place}, and {a}% of them are children.",
        f"{name} drives {big} miles at {a + 20} miles per hour, and {other} drives {b} miles.",
        f"A box holds {a} {good}, and a crate holds {b} boxes.",
        f"{name} is {a} years old, and {other} is {part} that age.",
        f"{name} needs {a} cups of flour for {b} {good}.",
        f"The {place} orders {a} {good} at ${b} each and {c} {more} at ${a} each.",
        f"It takes {name} {a} minutes to clean a room and {other} {b} minutes.",
    ])  # fmt: skip
    middle = rng.choice([
        f"{other} gives away {c} of them.", f"After {c} days, the price goes up by {a}%.",
        f"{other} has {part} as many {more}.", f"Each of {c} friends gets an equal share.",
        f"They spend ${c} on {more}.", f"{name} loses {c} and then finds {b} {more}.", "",
        f"The week after, it is {c} more than that.", f"{other} pays {part} of the cost.",
    ])  # fmt: skip
    question = rng.choice([
        f"How many {good} are left in the end?", f"How much money does {name} have now?",
        "How many are there in total?", f"How much does it cost {name} altogether?",
        f"How many more does {name} have than {other}?", "How many hours does that take?",
        f"What is the profit after {c} weeks?", "How many would be needed for a month?",
        f"How old will {other} be in {c} years?", "What percentage is that?",
    ])  # fmt: skip
    return " ".join(x for x in (opening, middle, question) if x) + STEP_BY_STEP


def mathematics(rng: random.Random) -> str:
    """A competition-style question in LaTeX."""
    a, b, c, d = (rng.randint(2, 20) for _ in range(4))
    question = rng.choice([
        f"Solve for $x$: ${a}x + {b} = {c}x - {d}.$",
        f"What is the remainder when ${a}^{{{b}}}$ is divided by ${c}$?",
        f"Find the sum of the roots of $x^2 - {a}x + {b} = 0.$",
        f"Let $f(x) = {a}x^2 - {b}x + {c}.$ Compute $f({d})$.",
        f"How many positive divisors does ${a * b * c}$ have?",
        f"Compute $\\binom{{{a + 4}}}{{{min(b, 4)}}} + {c}!$ modulo ${d}$.",
        f"A triangle has sides of length ${a + 10}$, ${b + 10}$ and ${c + 10}$. Find its area.",
        f"Simplify $\\frac{{{a}x + {b}}}{{{c}}} - \\frac{{x}}{{{d}}}.$",
        f"If $\\log_{{{a}}} x = {min(b, 5)}$, what is $\\log_{{{a}}} (x^{{{c}}})$?",
        f"The vectors $\\mathbf{{u}} = ({a}, {b})$ and $\\mathbf{{v}} = ({c}, -{d})$ are given. "
        "Find $\\mathbf{u} \\cdot \\mathbf{v}.$",
        f"What is the probability that the sum of two dice is at least ${min(a, 11)}$?",
        f"Evaluate $\\sum_{{k=1}}^{{{a}}} ({b}k + {c}).$",
        f"Find the area of the circle $x^2 + y^2 - {2 * a}x + {2 * b}y = {c}.$",
        f"Evaluate $\\sqrt{{{a * a * b}}} + \\sqrt{{{b}}}.$",
        f"For how many integers $n$ is ${a} < n^2 < {a + b * c}$?",
        f"In how many ways can {a} people sit around a table with {b} seats?",
        f"Find the equation of the line through $({a}, {b})$ and $({c}, {d + 20}).$",
        f"Convert ${a * b * c}_{{10}}$ to base ${min(d, 9)}$.",
        f"Express $\\frac{{{a}}}{{{b}}} + \\frac{{{c}}}{{{d}}}$ as a common fraction.",
        f"The first term of an arithmetic sequence is ${a}$ and the common difference is ${b}$. "
        f"What is the ${c}$th term?",
        f"If $x + y = {a}$ and $xy = {b}$, what is $x^2 + y^2$?",
        f"Find the minimum value of $x^2 + {a}x + {b}$ over all real $x$.",
        f"Let $z = {a} + {b}i.$ Find $|z|^2 + |{c}z|.$",
        f"Compute $\\sin {a * 15}^\\circ \\cos {b * 15}^\\circ.$",
        f"The polynomial $p(x) = x^3 - {a}x^2 + {b}x - {c}$ has three roots. Find the sum of their "
        "squares.",
    ])  # fmt: skip
    return question + STEP_BY_STEP


def task(rng: random.Random) -> str:
    """What a small function shall do, as a verb phrase."""
    condition = rng.choice(CONDITIONS)
    text = rng.choice([
        lambda: f"find {rng.choice(MEASURES)} of the items {condition} in {{coll}}",
        lambda: f"find {rng.choice(MEASURES)} element in {{coll}}",
        lambda: f"check whether {rng.choice(CHECKS)}",
        lambda: f"{rng.choice(CHANGES).replace('{cond}', condition)} {{coll}}",
        lambda: f"{rng.choice(CHANGES).replace('{cond}', condition)} {{coll}}",
        lambda: f"calculate {rng.choice(FORMULAS)}",
        lambda: f"convert {{coll}} to {rng.choice(COLLECTIONS)}",
    ])()  # fmt: skip
    n = rng.randint(2, 12)
    text = text.replace("{coll}", rng.choice(COLLECTIONS))
    return text.replace("{n}", str(n)).replace("{m}", str(n + rng.randint(2, 50)))


def small_function(rng: random.Random) -> str:
    """A one-line request for a Python function."""
    start = rng.choice([
        "Write a function to", "Write a python function to", "Write a function to",
        "Write a Python function that can", "Implement a function to",
    ])  # fmt: skip
    end = rng.choice(["", "", "", " using a lambda function", " without built-in functions", ""])
    return f"{start} {task(rng)}{end}."


def _snippet(rng: random.Random, name: str, signature: str, text: str) -> str:
    imports = rng.choice(["", "from typing import List\n\n\n", "\n", "import math\n\n\n"])
    body = "\n    ".join(line.strip() for line in text.strip().splitlines())
    code = f'{imports}def {name}{signature}:\n    """ {body}\n    """\n'
    return f"{HEADER}```python\n{code}\n```"


def completion(rng: random.Random, documented: list[tuple[str, str, str]]) -> str:
    """A function with a docstring, to be completed."""
    if rng.random() < 0.5:
        return _snippet(rng, *rng.choice(documented))
    words = task(rng)
    skipped = {"a", "the", "of", "in", "to", "that", "are", "by", "is", "from", "whether", "with"}
    kept = [w for w in words.replace("'", "").replace("-", "_").split() if w not in skipped]
    name = "_".join(w.lower() for w in kept[:3] if w.isidentifier()) or "solve"
    signature, example = rng.choice([
        ("(numbers: List[int]) -> List[int]", f"{name}([3, 1, {rng.randint(2, 9)}])\n[1, 3]"),
        ("(text: str) -> str", f"{name}('{rng.choice(GOODS)}')\n'{rng.choice(GOODS)}'"),
        ("(n: int) -> bool", f"{name}({rng.randint(2, 99)})\n{rng.random() < 0.5}"),
        ("(x, y)", f"{name}({rng.randint(2, 9)}, {rng.randint(2, 9)})\n{rng.randint(2, 99)}"),
        ("(strings: List[str], k: int) -> int", f"{name}(['a', 'bc'], 2)\n{rng.randint(0, 9)}"),
    ])  # fmt: skip
    return _snippet(rng, name, signature, f"{words[0].upper()}{words[1:]}.\n>>> {example}")


def chat(rng: random.Random) -> str:
    """A request to a general assistant."""
    if rng.random() < 0.2:
        return rng.choice([
            f"Write a {rng.choice(LANGUAGES)} program for {rng.choice(PROGRAMS)}.",
            f"Implement {rng.choice(PROGRAMS)} in {rng.choice(LANGUAGES)} and explain it.",
            f"I get an error with {rng.choice(PROGRAMS)} in {rng.choice(LANGUAGES)}. What could be "
            "wrong?",
        ])  # fmt: skip
    first, second = rng.sample(TOPICS, 2)
    return rng.choice(TASKS).replace("{t}", first.strip()).replace("{u}", second.strip())


def documented_functions() -> list[tuple[str, str, str]]:
    """Functions of the standard library.

    Returns:
      Name, signature and the first lines of the docstring of each.
    """
    found = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        classes = [v for v in tuple(vars(module).values()) if inspect.isclass(v)]
        for owner in (module, *classes):
            for name, value in tuple(vars(owner).items()):
                doc = inspect.getdoc(value) if callable(value) else None
                if name.startswith("_") or not doc or len(doc) < 30 or '"""' in doc:
                    continue
                try:
                    signature = str(inspect.signature(value))
                except (TypeError, ValueError):
                    continue
                if "<" not in signature and len(signature) < 80:
                    found[name] = (name, signature, "\n".join(doc.split("\n\n")[:2])[:400])
    return sorted(found.values())


def write_prompts(number: int, seed: int) -> list[dict]:
    """Prompts of all kinds in turn, none twice.

    Args:
      number: how many.
      seed: of the choices.

    Returns:
      Lines with `id` and `turns`, as `dspark_jax.data generate --prompts` reads them.
    """
    rng = random.Random(seed)
    documented = documented_functions()
    kinds: list[tuple[str, Callable[[], str]]] = [
        ("word", lambda: word_problem(rng)),
        ("code", lambda: small_function(rng)),
        ("chat", lambda: chat(rng)),
        ("complete", lambda: completion(rng, documented)),
        ("maths", lambda: mathematics(rng)),
        ("chat", lambda: chat(rng)),
    ]
    rows: dict[str, str] = {}
    for i in range(100 * number):
        kind, make = kinds[i % len(kinds)]
        rows.setdefault(make(), kind)
        if len(rows) == number:
            break
    return [{"id": f"{k}-{i}", "turns": [t]} for i, (t, k) in enumerate(rows.items())]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--num", type=int, default=4000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    args = parser.parse_args()
    rows = write_prompts(args.num, args.seed)
    args.out.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), "utf-8")
    print(f"{len(rows)} prompts in {args.out}")


if __name__ == "__main__":
    main()
