/* A client of rsocket-java. Arguments: the port, then what to try. Prints one line for each result. */

import io.rsocket.Payload;
import io.rsocket.RSocket;
import io.rsocket.core.RSocketConnector;
import io.rsocket.transport.netty.client.TcpClientTransport;
import io.rsocket.util.DefaultPayload;
import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.zip.CRC32;

public final class Peer {
    private static final Duration PATIENCE = Duration.ofSeconds(60);

    private static long sum(ByteBuffer octets) {
        CRC32 crc = new CRC32();
        crc.update(octets);
        return crc.getValue();
    }

    private static byte[] pattern(int size) {
        byte[] octets = new byte[size];
        for (int at = 0; at < size; at++) {
            octets[at] = (byte) (at * 31 + at / 997);
        }
        return octets;
    }

    public static void main(String[] arguments) {
        RSocket peer =
            RSocketConnector.create()
                .fragment(Integer.parseInt(arguments[2]))
                .maxInboundPayloadSize(64 << 20)
                .connect(TcpClientTransport.create("127.0.0.1", Integer.parseInt(arguments[0])))
                .block(PATIENCE);
        switch (arguments[1]) {
            case "echo":
                for (int at = 3; at < arguments.length; at++) {
                    byte[] octets = pattern(Integer.parseInt(arguments[at]));
                    Payload answer = peer.requestResponse(DefaultPayload.create(octets)).block(PATIENCE);
                    boolean same = sum(answer.getData()) == sum(ByteBuffer.wrap(octets));
                    System.out.println(answer.data().readableBytes() + (same ? " the same" : " different"));
                }
                break;
            case "ask":
                for (int at = 3; at < arguments.length; at++) {
                    Payload answer = peer.requestResponse(DefaultPayload.create(arguments[at])).block(PATIENCE);
                    System.out.println(answer.data().readableBytes());
                }
                break;
            case "stream":
                Long items = peer.requestStream(DefaultPayload.create("count"))
                    .doOnNext(item -> System.out.println(item.getDataUtf8()))
                    .count()
                    .block(PATIENCE);
                System.out.println("complete " + items);
                peer.onClose().onErrorComplete().block(PATIENCE);
                System.out.println("closed");
                return;
            default:
                throw new IllegalArgumentException(arguments[1]);
        }
        peer.dispose();
    }
}
