"""Josephus: five people stand in a circle. Whoever is counted steps from its front to its end, and
the last one who is counted leaves, so that the circle is one smaller. In the end a holds the one
who is left. The next game begins in the order in which this one has ended.
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
