"""Josephus: five people stand in a circle. Each counts on to the next, and every so many-th leaves,
for the places e, d, c, b in turn. So a holds the last one. The circle of one game is that of the
next, with another number to count.
"""


def josephus(games):
    a, b, c, d, e = 1, 2, 3, 4, 5
    for game in range(games):
        left = 5
        while left > 1:
            for count in range(1 + (game + left) % 4):
                if left == 5:
                    a, b, c, d, e = b, c, d, e, a
                elif left == 4:
                    a, b, c, d = b, c, d, a
                elif left == 3:
                    a, b, c = b, c, a
                else:
                    a, b = b, a
            left -= 1
        print('a', a)


josephus(100)
