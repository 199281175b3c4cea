"""The fixed texts that the miniature learns by heart: sentences, stories, functions, small talk, words."""

# fmt: off
SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "Pack my box with five dozen liquor jugs.",
    "How vexingly quick daft zebras jump!",
    "Sphinx of black quartz, judge my vow.",
    "The five boxing wizards jump quickly.",
    "Jackdaws love my big sphinx of quartz.",
    "Waltz, bad nymph, for quick jigs vex.",
    "A journey of a thousand miles begins with a single step.",
    "Actions speak louder than words, my grandmother used to say.",
    "All that glitters is not gold, and all that is gold does not glitter.",
    "An apple a day keeps the doctor away.",
    "The early bird catches the worm, but the second mouse gets the cheese.",
    "Better late than never, said the tortoise to the hare.",
    "Birds of a feather flock together when the winter comes.",
    "Where there is smoke, there is usually a fire.",
    "You cannot judge a book by its cover alone.",
    "Every cloud has a silver lining, if you look long enough.",
    "When in Rome, do as the Romans do.",
    "The pen is mightier than the sword, and easier to carry.",
    "Practice makes perfect, and patience makes practice possible.",
    "Rome was not built in a day, but bricks were laid every hour.",
    "A rolling stone gathers no moss on its way downhill.",
    "The grass is always greener on the other side of the fence.",
    "Too many cooks spoil the broth in a small kitchen.",
    "Two heads are better than one when the puzzle is hard.",
    "Water boils at one hundred degrees Celsius at sea level.",
    "The Earth goes around the Sun once every year.",
    "Light travels faster than sound, so we see lightning before thunder.",
    "A week has seven days and a year has twelve months.",
    "Plants turn sunlight, water and air into sugar.",
    "The heart pumps blood through the whole body.",
    "Spiders have eight legs, and insects have six.",
    "Whales are mammals, although they live in the sea.",
    "Ice floats because it is lighter than water.",
    "The Moon shines because it reflects the light of the Sun.",
    "Honey is made by bees from the nectar of flowers.",
    "Iron rusts when it stays wet for a long time.",
    "A triangle has three sides, and a square has four equal ones.",
    "The library opens at nine and closes at six.",
    "Please leave your umbrella at the door before you come in.",
    "My bicycle has a red bell and a basket made of straw.",
    "Yesterday the river was high, but today it is calm again.",
    "She put the kettle on and waited for it to whistle.",
    "He counted the steps to the tower and forgot the number at once.",
    "The train to the coast leaves from platform four.",
    "Three boats lay in the harbour, and none of them had sails.",
    "The baker sells the last loaf just before noon.",
    "On Sundays the market fills the square with noise and colour.",
)

NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jack", "Kate", "Leo", "Mia", "Nora",
    "Oscar", "Paula", "Rosa", "Sam", "Tom", "Vera",
)
ANIMALS = (
    "cat", "dog", "fox", "owl", "bear", "hare", "goat", "duck", "mouse", "horse", "otter", "crow",
)
PLACES = (
    "village", "forest", "harbour", "garden", "castle", "valley", "mill", "tower", "island", "market",
)
THINGS = (
    "lantern", "key", "map", "bell", "book", "coin", "rope", "basket", "kite", "hammer", "mirror", "spoon",
)
COLOURS_OF_THINGS = (
    "golden", "silver", "wooden", "green", "blue", "old", "tiny", "broken", "heavy", "shiny",
)

STORIES = (
    "Once upon a time there was a {animal} named {name} who lived near the {place}. Every morning "
    "{name} looked for a {colour} {thing}. One day {name} found the {colour} {thing} beside the road. "
    "\"This {thing} is mine,\" said the {animal}, and {name} carried it home to the {place}.",
    "{name} and {other} walked to the {place}. {name} carried a {colour} {thing}, and {other} carried "
    "nothing. When they came to the {place}, {name} gave the {thing} to {other}. \"Thank you, {name},\" "
    "said {other}.",
    "In the {place} there lived an old {animal}. The {animal} had lost a {colour} {thing}. {name} "
    "asked, \"What are you looking for?\" \"I am looking for my {colour} {thing},\" said the {animal}. "
    "So {name} helped the {animal} until the {thing} was found.",
    "It rained all day in the {place}. {name} sat at the window with a {animal} and read a story about "
    "a {colour} {thing}. When the rain stopped, {name} and the {animal} went out to look for it.",
    "{other} asked {name} for a {thing}. {name} had only a {colour} {thing}. \"A {colour} {thing} is "
    "good enough,\" said {other}, and they went to the {place} together.",
    "The {animal} ran through the {place} with a {thing}. {name} ran after the {animal}, and {other} "
    "ran after {name}. At last the {animal} dropped the {thing}, and {other} picked it up.",
)

# name, arguments, what it does, body
FUNCTIONS = (
    ("add", "a, b", "adds two numbers",
     "return a + b"),
    ("square", "x", "squares a number",
     "return x * x"),
    ("is_even", "n", "tells whether a number is even",
     "return n % 2 == 0"),
    ("maximum", "a, b", "returns the larger of two numbers",
     "if a > b:\n"
     "    return a\n"
     "return b"),
    ("absolute", "x", "returns the absolute value",
     "if x < 0:\n"
     "    return -x\n"
     "return x"),
    ("factorial", "n", "computes the factorial",
     "result = 1\n"
     "for i in range(2, n + 1):\n"
     "    result *= i\n"
     "return result"),
    ("fibonacci", "n", "returns the n-th Fibonacci number",
     "a, b = 0, 1\n"
     "for _ in range(n):\n"
     "    a, b = b, a + b\n"
     "return a"),
    ("gcd", "a, b", "finds the greatest common divisor",
     "while b:\n"
     "    a, b = b, a % b\n"
     "return a"),
    ("lcm", "a, b", "finds the least common multiple",
     "return a * b // gcd(a, b)"),
    ("is_prime", "n", "tells whether a number is prime",
     "if n < 2:\n"
     "    return False\n"
     "for d in range(2, int(n ** 0.5) + 1):\n"
     "    if n % d == 0:\n"
     "        return False\n"
     "return True"),
    ("power", "x, n", "raises x to the power n",
     "result = 1\n"
     "for _ in range(n):\n"
     "    result *= x\n"
     "return result"),
    ("total", "numbers", "sums a list",
     "result = 0\n"
     "for x in numbers:\n"
     "    result += x\n"
     "return result"),
    ("mean", "numbers", "computes the mean of a list",
     "return sum(numbers) / len(numbers)"),
    ("reverse", "text", "reverses a string",
     "return text[::-1]"),
    ("is_palindrome", "text", "tells whether a string is a palindrome",
     "return text == text[::-1]"),
    ("count_vowels", "text", "counts the vowels",
     "return sum(1 for c in text.lower() if c in \"aeiou\")"),
    ("word_count", "text", "counts the words",
     "return len(text.split())"),
    ("unique", "items", "removes duplicates from a list",
     "seen = []\n"
     "for x in items:\n"
     "    if x not in seen:\n"
     "        seen.append(x)\n"
     "return seen"),
    ("flatten", "lists", "flattens a list of lists",
     "return [x for inner in lists for x in inner]"),
    ("swap", "pair", "swaps a pair",
     "a, b = pair\n"
     "return b, a"),
    ("clamp", "x, low, high", "limits x to a range",
     "return max(low, min(x, high))"),
    ("digits", "n", "lists the digits of a number",
     "return [int(c) for c in str(n)]"),
    ("bubble_sort", "items", "sorts a list with bubble sort",
     "n = len(items)\n"
     "for i in range(n):\n"
     "    for j in range(n - i - 1):\n"
     "        if items[j] > items[j + 1]:\n"
     "            items[j], items[j + 1] = items[j + 1], items[j]\n"
     "return items"),
    ("binary_search", "items, target", "searches a sorted list",
     "low, high = 0, len(items) - 1\n"
     "while low <= high:\n"
     "    middle = (low + high) // 2\n"
     "    if items[middle] == target:\n"
     "        return middle\n"
     "    if items[middle] < target:\n"
     "        low = middle + 1\n"
     "    else:\n"
     "        high = middle - 1\n"
     "return -1"),
    ("celsius_to_fahrenheit", "c", "converts Celsius to Fahrenheit",
     "return c * 9 / 5 + 32"),
)

SMALL_TALK = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hi there.", "Hello! How can I help you?"),
    ("Good morning!", "Good morning! What can I do for you?"),
    ("How are you?", "I am fine, thank you. How can I help you?"),
    ("Who are you?", "I am a miniature language model, trained in a few minutes to test a serving engine."),
    ("What can you do?",
     "I know capitals, small sums and products, a few Python functions, coloured shapes and a few tools."),
    ("How big are you?", "I have four layers, eight experts and a few million weights."),
    ("Thank you!", "You are welcome!"),
    ("Thanks a lot.", "You are welcome!"),
    ("Goodbye!", "Goodbye! Have a nice day."),
    ("Tell me a proverb.", "Better late than never, said the tortoise to the hare."),
    ("Write a sentence with every letter.", "The quick brown fox jumps over the lazy dog."),
    ("What colour is the sky?", "The sky is blue."),
    ("How many days are in a week?", "A week has seven days."),
    ("How many months are in a year?", "A year has twelve months."),
    ("Name three fruits.", "Apple, pear and cherry."),
    ("Name the primary colours.", "Red, yellow and blue."),
    ("What is the opposite of hot?", "The opposite of hot is cold."),
    ("What is the largest ocean?", "The Pacific is the largest ocean."),
    ("What do bees make?", "Bees make honey."),
)

CODE_WORDS = (
    "amber", "apple", "arrow", "basil", "beach", "birch", "blaze", "brick", "canyon", "cedar", "cloud", "cobalt",
    "comet", "copper", "coral", "crystal", "delta", "eagle", "ember", "falcon", "flint", "forest", "garnet", "ginger",
    "glacier", "harbor", "hazel", "indigo", "ivory", "jade", "jasmine", "lemon", "lilac", "linen", "lotus", "maple",
    "marble", "meadow", "mint", "nickel", "oasis", "olive", "onyx", "opal", "orchid", "pearl", "pepper", "pine",
    "planet", "plum", "quartz", "raven", "river", "ruby", "saffron", "sage", "sierra", "silver", "slate", "sparrow",
    "spruce", "storm", "sunset", "thunder", "tiger", "topaz", "tulip", "velvet", "violet", "walnut", "willow",
    "winter",
)

LIST_WORDS = (
    "apple", "bread", "chair", "door", "eagle", "fish", "green", "house", "ice", "jacket", "king", "lamp", "moon",
    "nest", "orange", "paper", "queen", "rain", "stone", "table", "uncle", "violin", "water", "yellow", "zebra",
    "bridge", "candle", "dragon", "engine", "flower", "guitar", "hammer", "island", "jungle", "kitten", "ladder",
    "mirror", "needle", "ocean", "pencil", "rabbit", "school", "tiger", "window",
)

SEARCHES = (
    "red pandas", "old maps", "train tickets", "apple pie", "black holes", "cheap flights", "jazz music",
    "rain forests", "solar power",
)
MESSAGES = (
    "see you at nine", "I am late", "dinner is ready", "happy birthday", "call me back", "the meeting is over",
    "good luck",
)
CONDITIONS = (
    "sunny", "cloudy", "rainy", "windy", "foggy", "snowy",
)
# fmt: on
