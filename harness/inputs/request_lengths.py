"""How long the requests of op serving are: tokens of the prompt, and new tokens.

short  synthetic: the quantiles 1/256, 3/256, ... of two log-normal distributions, each shuffled by
       itself. Prompts have a median of 64 tokens, a sigma of 0.6 and 16 to 240 tokens, 76 on
       average; answers have a median of 24, a sigma of 0.4 and 8 to 64 tokens, 26 on average.
       Alpaca has 19 and 58 on average, ShareGPT 161 and 338 (Kwon et al. 2023, figure 11). Answers
       are shorter here, so that a round of servers takes seconds
one    a prompt of two tokens and a new one, for tests
"""

# fmt: off
SHORT = (
    (53, 24), (50, 17), (118, 23), (71, 35), (41, 43), (31, 22), (57, 20), (37, 46), (203, 27),
    (94, 27), (28, 33), (51, 34), (20, 23), (54, 19), (81, 21), (126, 44), (32, 23), (95, 10),
    (116, 38), (104, 23), (123, 29), (37, 19), (22, 22), (240, 15), (39, 28), (19, 25), (74, 20),
    (67, 20), (52, 24), (56, 29), (73, 16), (83, 16), (88, 24), (129, 28), (84, 22), (32, 8),
    (59, 32), (110, 26), (60, 24), (90, 41), (55, 25), (46, 38), (53, 21), (139, 21), (30, 29),
    (82, 31), (36, 15), (164, 20), (101, 23), (86, 14), (152, 19), (45, 18), (35, 21), (24, 17),
    (68, 15), (108, 26), (78, 17), (35, 24), (61, 12), (190, 25), (171, 59), (44, 18), (72, 18),
    (240, 26), (42, 55), (40, 22), (38, 21), (26, 19), (49, 32), (42, 34), (91, 13), (64, 19),
    (16, 36), (158, 37), (29, 25), (16, 28), (80, 50), (25, 17), (179, 24), (66, 37), (59, 17),
    (136, 30), (69, 45), (39, 30), (79, 12), (76, 42), (48, 40), (58, 14), (221, 22), (143, 31),
    (70, 39), (61, 32), (49, 48), (85, 35), (27, 15), (93, 11), (112, 13), (47, 29), (34, 27),
    (75, 25), (89, 28), (67, 26), (43, 12), (106, 40), (77, 30), (29, 16), (97, 33), (121, 14),
    (46, 13), (33, 34), (64, 22), (40, 64), (72, 16), (51, 33), (62, 21), (47, 18), (114, 30),
    (103, 15), (147, 19), (55, 31), (63, 11), (65, 18), (44, 17), (23, 36), (57, 20), (132, 27),
    (98, 26), (100, 52),
)
# fmt: on
LENGTHS = {"short": SHORT, "one": ((2, 1),)}


def lengths_of(name: str, requests: int) -> list[tuple[int, int]]:
    """Return prompt and new tokens of each request; after the last one they start again."""
    cycle = LENGTHS[name]
    return [cycle[number % len(cycle)] for number in range(requests)]
