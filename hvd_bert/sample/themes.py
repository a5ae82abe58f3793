"""What the sample's passages are about: the names, the facts and the sentences of our own invented world.

Nothing here is real and nothing is copied. `generate.py` puts these pieces together; `Theme.relations` says which
facts a kind of thing has, how a passage states each (`predicates`, which follow the subject) and how it is asked
for (`questions`, `{e}` being the thing's name).
"""

from __future__ import annotations

from dataclasses import dataclass

# Composed names: a start and an end make a whole, so that an unseen whole still consists of seen pieces.
PLACE_STARTS = ("bren", "cald", "dun", "elm", "farl", "grim", "hav", "kel", "lind", "mor", "nor", "oster", "pel",
                "quar", "rav", "sel", "thorn", "ulv", "vel", "wyn", "yar", "zel", "bir", "harr")
PLACE_ENDS = ("holt", "mere", "wick", "ford", "stead", "bury", "haven", "gate", "combe", "moor", "dale", "mouth",
              "ness", "thwaite", "beck", "minster")
RIVER_STARTS = ("tav", "lodd", "wens", "arr", "teg", "usk", "ith", "gwen", "swal", "nid", "yeo", "chur")
RIVER_ENDS = ("ow", "ey", "une", "arn", "ish", "ave")
SURNAME_STARTS = ("tol", "ack", "bar", "cren", "dor", "ell", "fen", "gar", "hob", "jes", "kast", "lor", "mab",
                  "nav", "ost", "pim", "rud", "sten", "tam", "var", "whit", "yel", "zim", "brod")
SURNAME_ENDS = ("vick", "brand", "ley", "man", "sen", "worth", "lund", "field", "kin", "croft", "dell", "berg",
                "shaw", "more", "quist", "well")
WOMEN = ("Mara", "Ilse", "Brida", "Nella", "Tessa", "Odile", "Ruth", "Sanna", "Vera", "Wilma", "Agnes", "Clara",
         "Edith", "Freya", "Greta", "Hedda", "Jonna", "Karin", "Livia", "Petra")
MEN = ("Anton", "Boris", "Cyril", "Dirk", "Emil", "Felix", "Gustav", "Henrik", "Ivan", "Jonas", "Klaus", "Lukas",
       "Magnus", "Nils", "Oscar", "Pavel", "Rolf", "Simon", "Tobias", "Ulrik")
SHIP_FIRST = ("Grey", "Golden", "Silent", "Northern", "Merry", "Proud", "Swift", "Crimson", "Lucky", "Brave",
              "Ancient", "Gentle", "Bright", "Lonely", "Royal", "Humble")
SHIP_SECOND = ("Heron", "Swallow", "Dolphin", "Lantern", "Maiden", "Falcon", "Thistle", "Mermaid", "Otter",
               "Pilgrim", "Comet", "Raven", "Sparrow", "Trader", "Anchor", "Badger")
BOOK_FIRST = ("Salt", "Winter", "Broken", "Hidden", "Paper", "Copper", "Distant", "Burning", "Borrowed", "Crooked",
              "Frozen", "Hollow", "Midnight", "Painted", "Stolen", "Velvet")
BOOK_SECOND = ("Orchard", "Mirror", "Garden", "Staircase", "Letter", "Harvest", "Window", "Island", "Kingdom",
               "Ladder", "Meadow", "Promise", "Shadow", "Violin", "Key", "Road")
BUILDINGS = ("Library", "Museum", "Theatre", "Tower", "Mill", "Hall", "Chapel", "Observatory")
FIRMS = ("Brothers", "Sisters", "Works", "Company", "Press", "Foundry")
PLANT_STARTS = ("ash", "bell", "cloud", "dew", "ember", "frost", "goat", "honey", "marsh", "moon", "star", "sun",
                "thunder", "wolf", "rain", "shell")
PLANT_ENDS = ("wort", "root", "leaf", "bane", "fern", "thorn", "bloom", "weed", "grass", "moss", "berry", "cress")

TRADES = ("baker", "carpenter", "weaver", "blacksmith", "printer", "tailor", "potter", "surgeon", "lawyer",
          "painter", "gardener", "miller", "brewer", "teacher", "sailor", "shepherd", "clockmaker", "glassblower",
          "fisherman", "miner", "cook", "barber", "farmer", "mason")
INSTRUMENTS = ("violin", "flute", "organ", "drum", "harp", "trumpet", "lute", "cello", "horn", "piano")
GOODS = ("wool", "copper", "dried fish", "timber", "salt", "silk", "barley", "tea", "lamp oil", "glass", "honey",
         "pepper", "coal", "paper", "olives", "rope", "tin", "linen", "wine", "sugar")
PRODUCTS = ("cheese", "pottery", "bells", "leather boots", "lace", "cider", "clocks", "knives", "candles",
            "umbrellas", "silver spoons", "carpets", "soap", "rye bread", "toys", "hats", "baskets", "mustard",
            "saddles", "buttons")
COLLECTIONS = ("old maps", "stuffed birds", "coins", "stone axes", "masks", "telescopes", "fossils", "tapestries",
               "swords", "sea shells", "dolls", "medals", "manuscripts", "butterflies", "portraits", "model boats")
MATERIALS = ("granite", "oak", "red brick", "limestone", "slate", "marble", "sandstone", "iron", "flint", "clay")
COLOURS = ("yellow", "white", "purple", "orange", "pale blue", "dark red", "pink", "green", "violet", "brown")
USES = ("ink", "tea", "soap", "dye", "glue", "bread", "medicine", "perfume", "rope", "syrup", "beer", "paper")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
          "November", "December")

# What may open a sentence, and the words that stand for a name.
LEADS = ("Records show that ", "As far as anyone knows, ", "According to an old letter, ", "People say that ",
         "It is certain that ", "The museum notes that ")
PRONOUNS = ("he", "she", "it", "the", "and", "captain")
COMPOSED = ((PLACE_STARTS, PLACE_ENDS), (RIVER_STARTS, RIVER_ENDS), (SURNAME_STARTS, SURNAME_ENDS),
            (PLANT_STARTS, PLANT_ENDS))


@dataclass(frozen=True)
class Relation:
    """One kind of fact. `value` names a kind of value in generate.py; `unit` is the word after a number, if any."""

    value: str
    predicates: tuple[str, ...]
    questions: tuple[str, ...]
    unit: str = ""


@dataclass(frozen=True)
class Theme:
    """One kind of thing. `{p}` is the article's place in `titles` and `openers`."""

    entity: str
    titles: tuple[str, ...]
    openers: tuple[str, ...]
    relations: dict[str, Relation]


_PERSON = Theme(
    entity="person",
    titles=("People of {p}", "Notable families of {p}", "Artists and makers of {p}"),
    openers=("The parish books of {p} mention many lives.", "{p} has been home to some remarkable people.",
             "A small book about {p} gives a few short portraits.", "Visitors to {p} often hear these stories."),
    relations={
        "birthplace": Relation("place", (
            "was born in {v}", "was born in the town of {v}", "was a native of {v}"),
            ("Where was {e} born?", "In which town was {e} born?", "Of which town was {e} a native?",
             "What was the birthplace of {e}?")),
        "year of birth": Relation("year", (
            "was born in the year {v}", "was born in {v}", "came into the world in {v}"),
            ("When was {e} born?", "In which year was {e} born?", "In what year did {e} come into the world?")),
        "trade": Relation("trade", (
            "worked as a {v}", "earned a living as a {v}", "was a {v} by trade", "trained as a {v}"),
            ("What did {e} work as?", "What was the trade of {e}?", "How did {e} earn a living?",
             "As what did {e} train?")),
        "teacher": Relation("person", (
            "was taught by {v}", "studied under {v}", "learned everything from {v}"),
            ("Who taught {e}?", "Under whom did {e} study?", "Who was the teacher of {e}?",
             "From whom did {e} learn everything?")),
        "spouse": Relation("person", (
            "married {v}", "was married to {v}"),
            ("Whom did {e} marry?", "To whom was {e} married?", "Who married {e}?")),
        "later home": Relation("place", (
            "moved to {v}", "later settled in {v}", "found a new home in {v}"),
            ("Where did {e} move to?", "Where did {e} settle later?", "In which town did {e} find a new home?")),
        "instrument": Relation("instrument", (
            "played the {v}", "liked to play the {v}", "owned a fine {v}"),
            ("What instrument did {e} play?", "Which instrument did {e} like to play?",
             "Which instrument did {e} own?")),
    },
)

_SHIP = Theme(
    entity="ship",
    titles=("Ships of {p}", "The fleet of {p}", "Sailing out of {p}"),
    openers=("The harbour of {p} has seen many ships.", "Old sailors in {p} still tell of those days.",
             "A painting in {p} shows the harbour full of sails.", "The harbour books of {p} are well kept."),
    relations={
        "shipyard": Relation("place", (
            "was built in {v}", "was built at {v}", "came from the shipyard at {v}"),
            ("Where was {e} built?", "In which town was {e} built?", "From which shipyard did {e} come?")),
        "year of launch": Relation("year", (
            "was launched in {v}", "was launched in the year {v}", "first put to sea in {v}"),
            ("When was {e} launched?", "In which year was {e} launched?", "When did {e} first put to sea?")),
        "captain": Relation("person", (
            "was commanded by {v}", "sailed under Captain {v}", "had {v} as captain"),
            ("Who commanded {e}?", "Who was the captain of {e}?", "Under which captain did {e} sail?")),
        "cargo": Relation("goods", (
            "carried {v}", "was loaded with {v}", "had a cargo of {v}"),
            ("What did {e} carry?", "What was the cargo of {e}?", "What was {e} loaded with?")),
        "place of loss": Relation("place", (
            "sank near {v}", "was lost off {v}", "was wrecked on the rocks of {v}"),
            ("Where did {e} sink?", "Where was {e} lost?", "On the rocks of which place was {e} wrecked?")),
        "size of crew": Relation("count", (
            "had a crew of {v} sailors", "was worked by {v} sailors", "needed a crew of {v} sailors"),
            ("How many sailors were in the crew of {e}?", "How large a crew did {e} need?",
             "How many sailors worked {e}?"), unit="sailors"),
    },
)

_TOWN = Theme(
    entity="place",
    titles=("Towns around {p}", "The district of {p}", "A guide to the {p} valley"),
    openers=("The country around {p} is green and quiet.", "A road from {p} leads through several small towns.",
             "Travellers who leave {p} have much to see.", "The hills near {p} hide some old towns."),
    relations={
        "river": Relation("river", (
            "lies on the river {v}", "stands beside the river {v}", "takes its water from the river {v}"),
            ("On which river does {e} lie?", "Beside which river does {e} stand?",
             "From which river does {e} take its water?")),
        "founder": Relation("person", (
            "was founded by {v}", "owes its start to {v}", "was laid out by {v}"),
            ("Who founded {e}?", "By whom was {e} founded?", "To whom does {e} owe its start?",
             "Who laid out {e}?")),
        "year of founding": Relation("year", (
            "was founded in {v}", "was founded in the year {v}", "became a town in {v}"),
            ("When was {e} founded?", "In which year was {e} founded?", "When did {e} become a town?")),
        "product": Relation("product", (
            "is known for its {v}", "is famous for {v}", "lives from making {v}"),
            ("What is {e} known for?", "For what is {e} famous?", "What does {e} live from making?")),
        "month of fair": Relation("month", (
            "holds its fair in {v}", "has a great fair every {v}", "keeps its feast in {v}"),
            ("In which month does {e} hold its fair?", "When does {e} have a great fair?",
             "In which month does {e} keep its feast?")),
        "number of inhabitants": Relation("large", (
            "has {v} inhabitants", "has about {v} inhabitants", "counts {v} inhabitants"),
            ("How many inhabitants does {e} have?", "How many inhabitants does {e} count?",
             "How many people live in {e}?"), unit="inhabitants"),
    },
)

_BOOK = Theme(
    entity="book",
    titles=("Books from {p}", "The writers of {p}", "Reading in {p}"),
    openers=("The bookshop in {p} keeps a shelf of old novels.", "Readers in {p} are fond of local novels.",
             "A reading club meets in {p} every week.", "The school in {p} gives its pupils these books."),
    relations={
        "author": Relation("person", (
            "was written by {v}", "is the work of {v}", "came from the pen of {v}"),
            ("Who wrote {e}?", "Whose work is {e}?", "By whom was {e} written?", "From whose pen came {e}?")),
        "year of printing": Relation("year", (
            "was published in {v}", "was published in the year {v}", "first appeared in {v}"),
            ("When was {e} published?", "In which year was {e} published?", "When did {e} first appear?")),
        "setting": Relation("place", (
            "is set in {v}", "takes place in {v}", "describes daily life in {v}"),
            ("Where is {e} set?", "Where does {e} take place?", "Daily life in which town does {e} describe?")),
        "hero": Relation("trade", (
            "tells the story of a {v}", "follows a young {v}", "is about a {v}"),
            ("Whose story does {e} tell?", "Whom does {e} follow?", "Who is {e} about?")),
        "illustrator": Relation("person", (
            "was illustrated by {v}", "has drawings by {v}", "contains pictures by {v}"),
            ("Who illustrated {e}?", "Who made the drawings for {e}?", "By whom are the pictures in {e}?")),
        "number of pages": Relation("count", (
            "has {v} pages", "runs to {v} pages", "fills {v} pages"),
            ("How many pages does {e} have?", "To how many pages does {e} run?",
             "How many pages does {e} fill?"), unit="pages"),
    },
)

_BUILDING = Theme(
    entity="building",
    titles=("Buildings of {p}", "A walk through {p}", "The old centre of {p}"),
    openers=("A walk through {p} takes about an hour.", "{p} is proud of its fine old buildings.",
             "Some buildings in {p} are worth a visit.", "The square in {p} is the best place to begin."),
    relations={
        "architect": Relation("person", (
            "was designed by {v}", "was drawn up by {v}", "was planned by {v}"),
            ("Who designed {e}?", "Who planned {e}?", "By whom was {e} drawn up?",
             "Who was the designer of {e}?")),
        "year of opening": Relation("year", (
            "was opened in {v}", "opened its doors in {v}", "was finished in {v}"),
            ("When was {e} opened?", "In which year did {e} open its doors?", "When was {e} finished?")),
        "material": Relation("material", (
            "is built of {v}", "is made of {v}", "has walls of {v}"),
            ("What is {e} built of?", "Of what is {e} made?", "What are the walls of {e} made of?")),
        "owner": Relation("person", (
            "belongs to {v}", "is owned by {v}", "was a gift from {v}"),
            ("To whom does {e} belong?", "Who owns {e}?", "From whom was {e} a gift?")),
        "height": Relation("count", (
            "is {v} feet tall", "rises to {v} feet", "stands {v} feet tall"),
            ("How tall is {e}?", "To how many feet does {e} rise?", "How many feet tall does {e} stand?"),
            unit="feet"),
        "collection": Relation("collection", (
            "houses a collection of {v}", "shows {v}", "is full of {v}"),
            ("What collection does {e} house?", "What does {e} show?", "What is {e} full of?")),
    },
)

_FIRM = Theme(
    entity="firm",
    titles=("Trade and industry in {p}", "The workshops of {p}", "Business in {p}"),
    openers=("Trade came to {p} with the canal.", "The market of {p} draws workshops from far away.",
             "A few family firms trade in {p}.", "The council of {p} keeps a list of its firms."),
    relations={
        "founder": Relation("person", (
            "was started by {v}", "was set up by {v}", "owes its start to {v}"),
            ("Who started {e}?", "By whom was {e} set up?", "To whom does {e} owe its start?")),
        "year of founding": Relation("year", (
            "was started in {v}", "was set up in {v}", "began work in {v}"),
            ("When was {e} started?", "In which year was {e} set up?", "When did {e} begin work?")),
        "home town": Relation("place", (
            "has its workshop in {v}", "is based in {v}", "works from a yard in {v}"),
            ("Where does {e} have its workshop?", "Where is {e} based?", "In which town is the yard of {e}?")),
        "product": Relation("product", (
            "makes {v}", "produces {v}", "is famous for {v}"),
            ("What does {e} make?", "What does {e} produce?", "For what is {e} famous?")),
        "raw material": Relation("goods", (
            "buys {v}", "pays well for {v}", "imports {v}"),
            ("What does {e} buy?", "For what does {e} pay well?", "What does {e} import?")),
        "number of workers": Relation("count", (
            "employs {v} workers", "has {v} workers", "gives work to {v} workers"),
            ("How many workers does {e} employ?", "How many workers does {e} have?",
             "To how many workers does {e} give work?"), unit="workers"),
    },
)

_PLANT = Theme(
    entity="plant",
    titles=("Plants of the {p} hills", "Wild flowers near {p}", "The herb garden of {p}"),
    openers=("The hills near {p} are rich in wild plants.", "The herb garden of {p} is open all summer.",
             "Herbs have been gathered in {p} for centuries.", "A walk near {p} is a joy in any season."),
    relations={
        "finder": Relation("person", (
            "was first described by {v}", "was discovered by {v}", "was named by {v}"),
            ("Who first described {e}?", "Who discovered {e}?", "By whom was {e} named?")),
        "colour": Relation("colour", (
            "has {v} flowers", "bears {v} flowers", "is covered in {v} flowers"),
            ("What colour are the flowers of {e}?", "Flowers of what colour does {e} bear?",
             "Which colour do the flowers that cover {e} have?")),
        "habitat": Relation("place", (
            "grows near {v}", "is common around {v}", "is found only at {v}"),
            ("Where does {e} grow?", "Around which place is {e} common?", "Where is {e} found?")),
        "use": Relation("use", (
            "is used to make {v}", "is used for {v}", "gives a good {v}"),
            ("What is {e} used to make?", "What is {e} used for?", "What does {e} give?")),
        "season": Relation("month", (
            "flowers in {v}", "is picked in {v}", "is ripe in {v}"),
            ("When does {e} flower?", "In which month is {e} picked?", "When is {e} ripe?")),
        "year of arrival": Relation("year", (
            "was brought here in {v}", "reached these parts in {v}", "was first seen in {v}"),
            ("When was {e} brought here?", "In which year did {e} reach these parts?",
             "When was {e} first seen?")),
    },
)

THEMES = (_PERSON, _SHIP, _TOWN, _BOOK, _BUILDING, _FIRM, _PLANT)


def all_text() -> list[str]:
    """Every list entry and sentence above but the parts of composed names, for the vocabulary."""
    text = [*WOMEN, *MEN, *SHIP_FIRST, *SHIP_SECOND, *BOOK_FIRST, *BOOK_SECOND, *BUILDINGS, *FIRMS, *TRADES,
            *INSTRUMENTS, *GOODS, *PRODUCTS, *COLLECTIONS, *MATERIALS, *COLOURS, *USES, *MONTHS, *LEADS, *PRONOUNS]
    for theme in THEMES:
        text += [*theme.titles, *theme.openers]
        for relation in theme.relations.values():
            text += [*relation.predicates, *relation.questions]
    return text
